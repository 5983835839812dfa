"""The train state of a run, its form in a snapshot, and whether a run can resume from one."""

import contextlib
import logging
import math
import time
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from torch.amp import GradScaler

from mingpt_ddp.config.config import (
    CODE_LOCATION_KEYS,
    Config,
    flatten,
    from_mapping,
    named_keys,
)
from mingpt_ddp.config.keys.fields import NonNegativeFloat, NonNegativeInt
from mingpt_ddp.config.validation import NotRegisteredError, build
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.metrics.jsonl import HistoryEnd
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.state_dict import load_model_state, load_optimizer_state
from mingpt_ddp.tasks.task import Task, recorded_sha256
from mingpt_ddp.training.trainable import Trainable

log = logging.getLogger(__name__)

NOT_IN_IDENTITY = ("name", "dropout", *CODE_LOCATION_KEYS)  # of model
# its content counts, wherever it comes from
DATA_SOURCE_KEYS = ("data.path", "data.sha256", "data.reader")
DATA_SHA256 = "the content of the data (SHA-256)"
# what reading an untrusted state may raise
INVALID = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, ConfigError)


Metrics: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=True)]]  # by name
OF_METRICS = ("train_metrics", "val_metrics", "loss_part_sums")  # fields of a train state


@dataclass
class Progress:
    """What a rollback restores. The data order and all random numbers follow from the step."""

    step: int = 0  # optimizer steps done
    train_loss: float | None = None  # mean of the last log interval
    val_loss: float | None = None
    val_metrics: Metrics = field(default_factory=dict)  # all of the evaluation, by name
    val_step: int | None = None  # of val_loss
    best_val_loss: float | None = None
    best_step: int | None = None
    wall_seconds: float = 0.0  # of all attempts, without work lost to a kill or a rollback
    loss_sum: float = 0.0  # of the current log interval
    # of the task's several losses, if it has some, and the sums and counts of metrics
    loss_part_sums: Metrics = field(default_factory=dict)
    loss_steps: int = 0
    timed_steps: int = 0  # all but the first of each attempt
    timed_seconds: float = 0.0  # of these, without evaluations and stalls
    stall_seconds: float = 0.0  # of wall_seconds, lost to stalls for snapshots
    saved_at: float = 0.0  # seconds since 1970, when the snapshot was taken
    loss_ema: float | None = None  # exponential moving average, to detect loss spikes
    patience_loss: float | None = None  # which an evaluation must get below, by trainer.min_delta
    evaluations_above: int = 0  # in a row that did not
    save_stall_s: NonNegativeFloat = 0.0  # of training for a snapshot, moving mean
    # of the last snapshot, from its start to its commit; None: unknown
    save_durable_s: NonNegativeFloat | None = None
    train_metrics: Metrics = field(default_factory=dict)  # own ones, as train_loss


@dataclass
class TrainState(Progress):
    """The train state of a run, which all its parts share: its progress, and what survives it."""

    world_size: int = 1  # of the last attempt that trained
    wasted_seconds: float = 0.0  # startup and lost work, of all attempts
    consecutive_skips: int = 0  # up to this step
    skipped_steps: list[int] = field(default_factory=list)  # skipped after a rollback
    run_id: str = ""  # random, of rank zero: the run in trackers, over all attempts
    failures: NonNegativeInt = 0  # attempts that died
    # of a step, which trainer.max_minutes is divided by; None: it has fixed no number of steps
    step_seconds: float | None = None

    @property
    def goodput(self) -> float:
        """The fraction of the time of all attempts that is kept progress, 0 to 1."""
        kept = self.wall_seconds - self.stall_seconds
        total = self.wall_seconds + self.wasted_seconds
        # lost work is measured with the clocks of two attempts
        return min(1.0, max(0.0, kept / max(total, 1e-9)))

    def roll_back(self, progress: Progress) -> None:
        """Return to the progress of a snapshot; the time since then is wasted."""
        self.wasted_seconds += self.wall_seconds - progress.wall_seconds
        for each in fields(Progress):
            setattr(self, each.name, getattr(progress, each.name))


def record_evaluation(state: TrainState, metrics: dict[str, float], min_delta: float) -> bool:
    """Record the metrics of an evaluation of this step; return whether its loss is the lowest."""
    state.val_loss = metrics["loss"]
    state.val_metrics = metrics
    state.val_step = state.step
    improved = state.best_val_loss is None or state.val_loss < state.best_val_loss
    if improved:
        state.best_val_loss = state.val_loss
        state.best_step = state.step
    count_patience(state, min_delta)
    return improved


def record_last_evaluation(
    state: TrainState, config: Config, steps: int, end: HistoryEnd | None, group: ProcessGroup
) -> None:
    """Record the evaluation of this step from metrics.jsonl if the run ended after it.

    The last snapshot lacks it if a signal came between that step and its evaluation, which the next
    start then made. A collective.

    Args:
        steps: the limit of the run.
        end: of metrics.jsonl, on rank zero.
    """
    every = config.trainer.eval_every or steps
    is_due = state.step % every == 0 or state.step == steps
    if state.step == 0 or not is_due or state.val_step == state.step:
        return
    metrics = group.run_on_rank_zero(lambda: _last_evaluation(end, state.step))
    if "loss" in metrics:
        record_evaluation(state, metrics, config.trainer.min_delta)


def _last_evaluation(end: HistoryEnd | None, step: int) -> dict[str, float]:
    """Return the metrics of the validation split, if the run ended at this step."""
    values = {}
    if end is not None and end.is_complete and end.step == step:
        for tag, value in end.metrics.items():
            if tag.startswith("val/"):
                values[tag.removeprefix("val/")] = value
    return values


def count_patience(state: TrainState, min_delta: float) -> None:
    """Count the evaluation that `state` has just recorded, for trainer.patience."""
    assert state.val_loss is not None
    if state.patience_loss is None or state.val_loss < state.patience_loss - min_delta:
        state.patience_loss = state.val_loss
        state.evaluations_above = 0
    else:
        state.evaluations_above += 1


def has_stopped_early(state: TrainState, patience: int | None) -> bool:
    """Return whether a run with this trainer.patience ends at this step."""
    if patience is None or state.step != state.val_step:
        return False
    return state.evaluations_above >= patience


@dataclass(frozen=True)
class Context:
    """What all parts of a training run share."""

    task: Task
    runtime: Runtime
    trainable: Trainable
    state: TrainState
    metrics: MetricsProcessor
    interrupt: SignalHandler
    code: dict[str, Any]  # what trains, on rank zero: storage/code_identity.py

    @property
    def config(self) -> Config:
        """The whole configuration."""
        return self.task.config


def snapshot_state(
    state: TrainState, runtime: Runtime, task: Task, plan: BatchPlan, steps: int
) -> dict[str, Any]:
    """Return the content of state.json.

    Args:
        steps: of the whole run, by the limits of this attempt.
    """
    state.saved_at = time.time()
    return {
        "train_state": _encode(state),
        "scaler": runtime.scaler.state_dict(),
        "micro_batch_size": plan.micro_batch_size,
        "steps": steps,
        **task.state(),
        "config": task.config.to_dict(),
        "environment": runtime.environment(),
    }


def restore_newest(manager: SnapshotManager, task: Task, trainable: Trainable) -> TrainState | None:
    """Load the newest snapshot, if there is one, into what is trained; return its train state.

    A collective.

    Raises:
        SnapshotError: there are snapshots, but none that this run can resume from.
    """
    found = manager.load_latest(partial(check_state, task=task))
    if found is None:
        return None
    manager.runtime.resume_precision(task.config, found.state)
    found = manager.read_shards(found, trainable.model, trainable.optimizer)
    return restore(found, trainable, manager.runtime.scaler)


def restore(snapshot: Snapshot, trainable: Trainable, scaler: GradScaler) -> TrainState:
    """Load a snapshot that `check_state` accepted into the live objects; return its TrainState."""
    model = trainable.model
    if trainable.average.decay is not None:
        if not snapshot.ema:
            log.info(
                "the snapshot has no average of the weights: trainer.ema starts from its weights"
            )
        load_model_state(model, snapshot.ema or snapshot.model)
        trainable.average.restart()
    load_model_state(model, snapshot.model)
    load_optimizer_state(model, trainable.optimizer, snapshot.optimizer)
    for note in trainable.actions.load(snapshot.hooks):
        log.warning("the snapshot has %s", note)
    if snapshot.state["scaler"]:
        scaler.load_state_dict(snapshot.state["scaler"])
    return read_train_state(snapshot.state)


def _encode(state: TrainState) -> dict[str, Any]:
    """Return the fields for a state.json. JSON has no NaN: a metric that is not finite is text."""
    values = asdict(state)
    for key in OF_METRICS:
        for name, value in values[key].items():
            values[key][name] = value if math.isfinite(value) else str(value)
    return values


def read_train_state(state: Any) -> TrainState:
    """Return the train state in a state.json, without fields added by later versions."""
    names = {each.name for each in fields(TrainState)}
    known = {key: value for key, value in state["train_state"].items() if key in names}
    for key in OF_METRICS:
        if key in known:
            known[key] = {name: _decode(value) for name, value in known[key].items()}
    return build(TrainState, known, "train_state")


def _decode(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def check_state(step: int, state: Any, task: Task) -> None:
    """Refuse a snapshot that this run cannot resume from.

    Args:
        state: the parsed state.json, untrusted.

    Raises:
        SnapshotError: its task, model, data or data order differs, or it was not written by a run.
    """
    config = task.config
    try:
        old = _recorded_settings(step, state, config)
    except INVALID as error:
        raise SnapshotError(
            f"the snapshot of step {step} has an invalid state: {str(error)[:300]}"
        ) from error
    new = flatten(config.to_dict())
    new[DATA_SHA256] = task.sha256[:16]
    differences = []
    for key in [*identity_keys(config.to_dict()), DATA_SHA256]:
        if old.get(key) != new.get(key):
            differences.append(f"{key} ({str(old.get(key))[:100]} there, {new.get(key)} now)")
    if not differences:
        return
    advice = "or choose another run.name, or run.resume=never"
    if config.run.source is not None:  # it would continue the training of another run
        advice = f"or write run.init_from={config.run.source} to start from its weights alone"
    raise SnapshotError(
        f"the snapshot of step {step} was saved with other settings: {', '.join(differences)}; "
        f"restore them, {advice}"
    )


def _recorded_settings(step: int, state: Any, config: Config) -> dict[str, Any]:
    """Return the configuration and the SHA-256 of the data in a state.json, by dotted key.

    Raises:
        One of INVALID: it is not the state of this step of a run.
    """
    # ddp may differ, even in its keys
    recorded = {**state["config"], "ddp": config.to_dict()["ddp"]}
    # so may the schedule, which code of the user may have registered
    recorded["optimizer"] = {
        **recorded["optimizer"],
        "schedule": config.optimizer.schedule,
        "schedule_settings": config.optimizer.schedule_settings,
    }
    with contextlib.suppress(NotRegisteredError):  # another model or optimizer: it differs
        recorded = from_mapping(recorded).to_dict()  # with the defaults of newer keys
    micro_batch_size = state["micro_batch_size"]
    is_divided = recorded["trainer"]["batch_size"] % micro_batch_size == 0
    if read_train_state(state).step != step or not is_divided:
        recorded_step = state["train_state"]["step"]
        raise ValueError(f"step {recorded_step}, micro_batch_size {micro_batch_size}")
    settings = flatten(recorded)
    settings[DATA_SHA256] = recorded_sha256(state)[:16]
    return settings


def identity_keys(config: dict[str, Any]) -> list[str]:
    """List the keys whose values must match for a run to resume from a snapshot."""
    keys = [f"model.{key}" for key in config["model"] if key not in NOT_IN_IDENTITY]
    for key in named_keys(config):
        if key.startswith(("task.", "data.")) and key not in DATA_SOURCE_KEYS:
            keys.append(key)
    return [*keys, "trainer.batch_size", "optimizer.name", "run.seed", "run.init_sha256"]
