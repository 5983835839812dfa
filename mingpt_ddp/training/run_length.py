"""What is doubtful in the length of a run."""

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import BUILDERS
from mingpt_ddp.metrics.jsonl import MAX_BYTES, METRICS

BYTES_PER_LINE = 250  # of metrics.jsonl, about


def early_end(config: Config, steps: int) -> str | None:
    """Return a notice if the limit of epochs ends the run before that of steps."""
    limit = config.trainer.max_steps
    if limit is None or steps >= limit:
        return None
    end = f"trainer.max_epochs={config.trainer.max_epochs} ends the run at step {steps}"
    return f"{end}, before trainer.max_steps={limit}; set it to null to continue"


def long_warmup(config: Config, steps: int) -> str | None:
    """Return a warning if the learning rate never reaches its peak."""
    warmup = config.optimizer.warmup_steps
    length = config.optimizer.schedule_steps or steps
    if warmup <= length or config.optimizer.schedule in BUILDERS["schedule"]:
        return None
    return (
        f"the warm-up takes {warmup} of {length} steps; lower optimizer.warmup_steps to "
        "reach optimizer.lr"
    )


def long_metrics(config: Config, steps: int) -> str | None:
    """Return a warning if metrics.jsonl has no room for all steps."""
    most = MAX_BYTES // BYTES_PER_LINE * config.trainer.log_every
    if steps <= most:
        return None
    return (
        f"{METRICS} will be full at about step {most}: at most {MAX_BYTES:,} bytes are read; raise "
        "trainer.log_every"
    )
