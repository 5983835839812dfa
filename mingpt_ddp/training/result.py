"""Record the end of a run: write result.json, complete the trackers, call the user's hooks."""

import logging
import math
from pathlib import Path
from typing import Any

from mingpt_ddp.config.builders import code_roots
from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.errors import duration
from mingpt_ddp.storage.code_identity import with_loaded_files
from mingpt_ddp.storage.run_directory import RunDirectory, read_result
from mingpt_ddp.tasks.task import recorded_data
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.trainable import Run
from mingpt_ddp.training.trainer import TrainingEnd

log = logging.getLogger(__name__)

# The goodput of a shorter run is not logged, since it mostly measures the start.
MIN_GOODPUT_S = 600.0


def record_end(
    run: Run, locked_directory: RunDirectory | None, observers: Observers, outcome: TrainingEnd
) -> None:
    """Write result.json, complete the trackers, call the hooks of the event `end`, and log a line.

    The hooks are called only if the run has trained since this start.

    Args:
        run: The run that has ended.
        locked_directory: The locked run directory. None on ranks other than zero, which do nothing.
        observers: The hooks and trackers of the run.
        outcome: How the training ended, with the metrics of the test split.
    """
    if locked_directory is None:
        return
    result = _result(run, outcome)
    locked_directory.write_result(result)
    if outcome.status is not RunStatus.PREEMPTED:
        for sender in observers.senders:
            sender.finish(result)
        for sender in observers.senders:
            sender.join()
        if not run.is_complete:
            observers.hooks.call("end", result)
    if outcome.status is RunStatus.COMPLETE:
        log_end(run, outcome, locked_directory.path)


def _result(run: Run, outcome: TrainingEnd) -> dict[str, Any]:
    """Collect the content of result.json."""
    state = run.state
    task = run.task
    result: dict[str, Any] = {"status": outcome.status.value}
    if outcome.status is RunStatus.COMPLETE and state.step < run.length.steps:
        result["stopped_early"] = True
    result["step"] = state.step
    result["epoch"] = state.step / run.loader.steps_per_epoch
    result["train_loss"] = state.train_loss
    for name, value in state.train_metrics.items():
        result[f"train_{name}"] = _finite(value)
    if state.val_loss is not None:  # a loop of the user's own may never evaluate
        result["val_loss"] = state.val_loss
    for name, value in state.val_metrics.items():
        result[f"val_{name}"] = _finite(value)
    for name, value in outcome.test_metrics.items():
        result[f"test_{name}"] = _finite(value)
    for name in task.comparable:
        if name in state.val_metrics:
            result[name] = _finite(state.val_metrics[name])
    if state.best_val_loss is not None:
        result["best_val_loss"] = state.best_val_loss
    result[task.unit] = state.step * run.loader.items_per_step
    result["parameters"] = run.trainable.n_parameters
    result["wall_seconds"] = state.wall_seconds
    if run.config.trainer.max_minutes is not None:
        result["minutes"] = run.length.minutes
    result["goodput"] = state.goodput
    result["world_size"] = state.world_size
    result["data"] = recorded_data(task.state())
    # Hooks may have imported files after the start.
    code = run.code if run.is_complete else with_loaded_files(run.code, code_roots())
    if code:
        result["code"] = code
    return result


def recorded_test(directory: Path) -> dict[str, float]:
    """Read the metrics of the test split from result.json."""
    values = {}
    for key, value in read_result(directory).items():
        if key.startswith("test_") and isinstance(value, float):
            values[key.removeprefix("test_")] = value
    return values


def _finite(value: float) -> float | None:
    """Return a value for JSON: None if it is not finite, since JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def log_end(run: Run, outcome: TrainingEnd, directory: Path) -> None:
    """Log the last step of a run with its losses and time, and the run directory."""
    state = run.state
    task = run.task
    total_s = state.wall_seconds + state.wasted_seconds
    if total_s >= MIN_GOODPUT_S:
        elapsed = duration(total_s)
        lost = duration(state.stall_seconds + state.wasted_seconds)
        causes = "starts, pauses, snapshots and repeated steps"
        log.info("goodput %.1f%%: %s took %s of %s", 100 * state.goodput, causes, lost, elapsed)
    if run.config.trainer.max_minutes is not None:
        log.info(run.length.describe_time())
    values = "not evaluated"
    if state.val_metrics:
        values = f"validation {task.describe(state.val_metrics)}"
    if outcome.test_metrics:
        values += f"; test {task.describe(outcome.test_metrics)}"
    log.info(
        "done: %s after %d steps and %s; the run is in %s",
        values,
        state.step,
        duration(state.wall_seconds),
        directory,
    )
