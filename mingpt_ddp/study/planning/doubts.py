"""Find settings that are valid but look doubtful. Explain each, and suggest what to change."""

from collections.abc import Iterator
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.optimizer_config import OptimizerConfig
from mingpt_ddp.metrics.gpus import GIB
from mingpt_ddp.training.length import early_end_notice, long_warmup_warning
from mingpt_ddp.training.start.start_log import full_metrics_warning

MANY_EPOCHS = 10
# A model is large if it has more parameters than this for each token or sample of the data.
LARGE_MODEL = 10


def find_doubts(config: Config, plan: dict[str, Any], cores: int) -> list[str]:
    """List the doubtful settings of a configuration, one sentence each.

    Args:
        plan: Result of `make_plan`, before its entry "doubts" is added.
        cores: Number of CPU cores of this machine.
    """
    doubts = [*_doubt_length(config, plan), *_doubt_batch(config.optimizer, plan["batch"])]
    measured = plan["measured"]
    if measured is None:
        return doubts
    doubts += [*_doubt_memory(plan), *_doubt_evaluations(measured)]
    workers = config.ddp.local_workers
    if config.trainer.device == "cpu" and workers > cores:
        doubts.append(
            f"ddp.nproc_per_node={workers} is more than the {cores} cores of this machine; lower it"
        )
    return doubts


def _doubt_length(config: Config, plan: dict[str, Any]) -> Iterator[str]:
    length = plan["length"]
    parameters = plan["model"]["parameters"]
    trainer = config.trainer
    if warmup := long_warmup_warning(config.optimizer, length["steps"]):
        yield warmup
    if end := early_end_notice(trainer, length["limits"]):
        yield end
    elif trainer.max_steps is not None and trainer.max_epochs is not None:
        yield (
            f"trainer.max_steps={trainer.max_steps} ends the run before "
            f"trainer.max_epochs={trainer.max_epochs}; set one of them to null"
        )
    items = length["items"] / length["epochs"]
    drops = getattr(config.model, "dropout", 0.0) > 0
    if length["epochs"] > MANY_EPOCHS and parameters > LARGE_MODEL * items and not drops:
        sizes = (
            f"{parameters:,} parameters see {items:,.0f} {length['unit']} "
            f"{length['epochs']:.0f} times"
        )
        yield (
            f"{sizes}, so that overfitting is likely; use more data, fewer steps, a smaller model, "
            "or model.dropout"
        )
    if full := full_metrics_warning(trainer.log_every, length["steps"]):
        yield full
    if trainer.eval_every is not None and trainer.eval_every > length["steps"]:
        yield (
            f"trainer.eval_every={trainer.eval_every} is beyond the last step, so the run "
            "would not show overfitting; lower it"
        )


def _doubt_batch(optimizer: OptimizerConfig, batch: dict[str, Any]) -> Iterator[str]:
    low, high = optimizer.usual_lr
    if not low <= batch["lr"] <= high:
        usual = f"but {low:g} to {high:g} is usual for {optimizer.name}"
        yield f"the learning rate is {batch['lr']:g}, {usual}; check optimizer.lr"
    if batch["idle"]:
        parts = f"{batch['micro_batches']} micro-batches on {batch['copies']} ranks"
        yield (
            f"{parts} leave the ranks idle for {batch['idle']:.0%} of the time; change "
            "trainer.batch_size or trainer.micro_batch_size"
        )


def _doubt_memory(plan: dict[str, Any]) -> Iterator[str]:
    needed, available = plan["measured"]["peak_bytes"], plan["memory_bytes"]
    if needed > available:
        yield (
            f"each rank needs {needed / GIB:.1f} GiB of memory but has {available / GIB:.1f} GiB; "
            "lower trainer.micro_batch_size, or set trainer.activation_checkpointing=true"
        )
    kept, free = plan["snapshots"]["kept_bytes"], plan["snapshots"]["free_bytes"]
    if free is not None and kept > free:
        yield (
            f"snapshots need {kept / GIB:.1f} GiB, but the disk has {free / GIB:.1f} GiB free; "
            "lower snapshot.keep_last, or choose another snapshot.path"
        )


def _doubt_evaluations(times: dict[str, Any]) -> Iterator[str]:
    if times["evaluations"] > 1 and times["evaluations_s"] > times["training_s"]:
        yield (
            f"evaluations take {times['evaluations_s']:.3g} s, which is longer than training "
            f"({times['training_s']:.3g} s); raise trainer.eval_every, or set trainer.eval_steps"
        )
