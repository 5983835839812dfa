"""Log lines at the start of a run: its data, its model, and changes since its last snapshot."""

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.config.keys.optimizer_config import OptimizerConfig
from mingpt_ddp.config.recorded import with_data_format, with_defaults
from mingpt_ddp.distributed.device.device import chooses_fp32
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.jsonl import MAX_BYTES, METRICS, HistoryEnd
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.models import count_parameters
from mingpt_ddp.optim.lr_schedule import scale_lr
from mingpt_ddp.storage.code_identity import (
    MAX_DESCRIPTION_CHARS,
    changed_files,
    describe,
    describe_change,
    recorded_code,
)
from mingpt_ddp.storage.run_directory import KEYS_NOT_COMPARED, changed_values, difference
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.length import RunLength, early_end_notice, long_warmup_warning
from mingpt_ddp.training.trainable import Run

log = logging.getLogger(__name__)

# If the load average per core is at least this high, other programs keep the machine busy. A run
# alone causes a load of about 1 per core.
BUSY_LOAD = 1.5
MAX_CELL_LENGTH = 100  # maximal length of a value in a table, in characters; the rest is cut off
NEW_RUN_ADVICE = "choose another run.name to train a new run with the current code"
METRICS_BYTES_PER_LINE = 250  # typical length of a line of metrics.jsonl


def log_start(
    runtime: Runtime, task: Task, model: nn.Module, directory: Path, length: RunLength
) -> None:
    """Log the data, the model, the device and the limits."""
    config = task.config
    step = length.state.step
    steps = length.steps
    log.info("run %s", directory)
    for line in [*task.data_notes(), task.describe_data()]:
        log.info("%s", line)
    devices = f"{runtime.group.world_size} x {runtime.device.type} in {runtime.precision}"
    log.info(
        "%s: %.2fM parameters, on %s", config.model.name, count_parameters(model) / 1e6, devices
    )
    by_key = {"lr": config.optimizer.lr, **_further_rates(config.optimizer)}
    if runtime.precision == "fp32" and chooses_fp32(config, runtime.device):
        log.info(
            "trainer.precision=auto is fp32 for a model of your own on a CPU; try "
            "trainer.precision=bf16, which is faster in wide matrix products, and slower in "
            "torch's attention"
        )
    log.info(
        "optimizer %s: %s",
        config.optimizer.name,
        ", ".join(f"{key} {rate:g}" for key, rate in by_key.items()),
    )
    if step < steps and runtime.device.type == "cpu":
        log_load(os.getloadavg()[0], os.cpu_count() or 1)
    if end := length.is_fixed and early_end_notice(config.trainer, length.limits):
        log.info(end)
    if config.optimizer.lr_scaling != "none":
        rates = (scale_lr(config.optimizer, config.trainer.batch_size).lr, config.optimizer.lr)
        batches = (config.trainer.batch_size, config.optimizer.reference_batch_size)
        log.info(
            "the learning rate is %.2e instead of %.2e, for a batch of %d instead of %d",
            *rates,
            *batches,
        )
    if step < steps and (warmup := long_warmup_warning(config.optimizer, steps)):
        log.warning(warmup)
    if full := length.is_fixed and full_metrics_warning(config.trainer.log_every, steps):
        log.warning(full)
    if step > steps:
        log.info("complete: the snapshot of step %d is beyond the limit of %d steps", step, steps)
    elif step == steps:
        log.info("complete: the newest snapshot is from the last step, %d", steps)
    elif step:
        log.info("resuming from the snapshot of step %d of %s", step, length.known_steps or "?")


def log_load(load: float, cores: int) -> None:
    """Log a line if other programs keep this machine busy, since that slows training down.

    Args:
        load: Number of processes that ran or waited for a core, on average over the last minute.
        cores: Number of cores of this machine.
    """
    if load >= BUSY_LOAD * cores:
        log.info(
            "this machine has %d cores and a load of %.1f: other programs can make training "
            "several times slower; end them, or set OMP_NUM_THREADS=1",
            cores,
            load,
        )


def full_metrics_warning(log_every: int, steps: int) -> str | None:
    """Return a warning if metrics.jsonl has no room for the metrics of all steps."""
    full_at = MAX_BYTES // METRICS_BYTES_PER_LINE * log_every
    if steps <= full_at:
        return None
    return (
        f"{METRICS} will be full at about step {full_at}, since it is limited to {MAX_BYTES:,} "
        "bytes; raise trainer.log_every"
    )


def log_code(code: dict[str, Any], resumed: dict[str, Any], step: int) -> None:
    """Log the version of the code, and the files that have changed since the snapshot.

    Args:
        code: The record of the code that trains now.
        resumed: The state of the snapshot that the run resumes from. {} for a new run.
        step: Step of the snapshot.
    """
    log.info("code %s", describe(code))
    before = recorded_code(resumed)
    if files := describe_change(before, code):
        log.warning(
            "the code has changed since the snapshot, which was trained with %s: %s; from step %d "
            "on the run is trained with the current code; %s",
            describe(before),
            files,
            step + 1,
            NEW_RUN_ADVICE,
        )


def warn_of_edited_code(code: dict[str, Any]) -> bool:
    """Warn if files of the user have been edited since the run was complete.

    Return True if there are such files.

    Args:
        code: The record of the code that has trained the run.
    """
    files = changed_files(code)
    if files:
        log.warning(
            "the run is complete; it was trained before these files were edited: %s; %s",
            ", ".join(files)[:MAX_DESCRIPTION_CHARS],
            NEW_RUN_ADVICE,
        )
    return bool(files)


def _further_rates(optimizer: OptimizerConfig) -> dict[str, float]:
    """Return the further learning rates of an optimizer by key.

    Muon, for example, uses `lr` only for matrices, and another rate for all other parameters.
    """
    names = [field.name for field in fields(optimizer) if field.name.endswith("_lr")]
    return {name: getattr(optimizer, name) for name in names}


def log_changes(before: dict[str, Any], run: Run) -> None:
    """Log a table of changed settings and changed software, and the number of steps left.

    Args:
        before: The untrusted state of the snapshot. Without a snapshot, a dictionary whose "config"
            is the last recorded configuration.
        run: The run that starts.
    """
    recorded = {key: keys for key, keys in before["config"].items() if isinstance(keys, dict)}
    # The settings as this version would have recorded them, with the defaults of newer keys.
    old = flatten(with_defaults(with_data_format(recorded)))
    if unknown := sorted(map(str, flatten(recorded).keys() - old.keys())):
        log.info(
            "the recorded configuration has keys that this version does not know, and ignores: %s",
            ", ".join(unknown)[:MAX_DESCRIPTION_CHARS],
        )
    new = flatten(run.config.to_dict())
    old_environment = before.get("environment")
    if isinstance(old_environment, dict):
        old |= old_environment
        new |= run.runtime.environment()
    steps = run.length.known_steps
    if steps is not None and "steps" in before:
        old["steps"] = before["steps"]
        new["steps"] = steps
    common = {key: new[key] for key in old if key in new}
    changes = changed_values({key: old[key] for key in common}, common, KEYS_NOT_COMPARED)
    if not changes:
        return
    rows = [["key", "before", "now"]]
    for row in changes:
        rows.append([" ".join(cell[:MAX_CELL_LENGTH].split()) for cell in row])
    step = run.state.step
    log.info(
        "these values have changed from step %d on (%s steps are left):\n%s",
        step + 1,
        "?" if steps is None else steps - step,
        "\n".join(table_lines(rows, left=(0, 1, 2))),
    )


def warn_of_lost_snapshots(end: HistoryEnd | None) -> None:
    """Warn if a run has trained before but has no snapshot.

    Args:
        end: The end of its metrics.jsonl. None if there is none.
    """
    again = "but there is no snapshot: it starts again at step 0"
    if end is None:
        return
    if end.step is not None:
        log.warning("the run had reached step %d, %s", end.step, again)
    elif end.first_start is not None:
        log.warning("the run has trained before, %s", again)


def warn_of_unused_changes(previous: dict[str, Any], config: Config) -> None:
    """Warn that new settings have no effect, since the run is complete.

    Args:
        previous: The last recorded configuration of the run.
        config: The present configuration.
    """
    # Leave out ddp, since the result does not depend on the number of ranks.
    new = {group: keys for group, keys in config.to_dict().items() if group != "ddp"}
    # A key that the earlier version did not have counts as unchanged.
    old = {group: {**keys, **previous.get(group, {})} for group, keys in new.items()}
    if changes := difference(old, new, KEYS_NOT_COMPARED):
        log.warning("the run is complete, so it was not trained with %s", "; ".join(changes))
