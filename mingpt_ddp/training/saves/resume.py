"""Save the state of a run in a snapshot, check it before a run resumes, and restore it."""

import contextlib
import logging
import math
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch.amp import GradScaler

from mingpt_ddp.config.config import Config, flatten, from_mapping, keys_in_name
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.config.validation import NotRegisteredError, build, check
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.snapshots.format import (
    MAX_STATE_BYTES,
    REQUIRED_KINDS,
    STATE,
    Snapshot,
    encode_json,
)
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.read.load import snapshot_to_resume
from mingpt_ddp.snapshots.state_dict import load_model_state, load_optimizer_state
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.tasks.task import Task, recorded_sha256
from mingpt_ddp.training.train_state import METRIC_FIELDS, TrainState
from mingpt_ddp.training.trainable import Trainable

log = logging.getLogger(__name__)

# Keys of `model` that may change when a run resumes.
FREE_MODEL_KEYS = ("name", "dropout", "code")
# Keys that say where the data comes from. They may change, as long as the content is the same.
DATA_SOURCE_KEYS = ("data.path", "data.sha256", "data.reader")
DATA_SHA256 = "the content of the data (SHA-256)"
PROGRESS_BYTES = 1 << 20  # space in a state.json that is reserved for the progress of training
# Exceptions that an invalid state may cause.
INVALID_STATE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    ConfigError,
)


def snapshot_state(
    state: TrainState, runtime: Runtime, task: Task, plan: BatchPlan, steps: int
) -> dict[str, Any]:
    """Collect the content of state.json.

    Args:
        state: The train state of the run.
        runtime: The runtime of this rank.
        task: The task of the run.
        plan: How a batch is split into micro-batches.
        steps: Number of steps of the whole run, by the limits in the configuration.
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


def check_state_size(task: Task) -> None:
    """Refuse a configuration or data whose state.json would be too large for its readers.

    Raises:
        ConfigError: The state would be too large already at the start.
    """
    size = len(encode_json({**task.state(), "config": task.config.to_dict()}))
    limit = MAX_STATE_BYTES - PROGRESS_BYTES
    check(
        size <= limit,
        f"{STATE} would have {size:,} bytes at the start of the run, but a snapshot with more than "
        f"{limit:,} bytes could not be read again; it holds the configuration and the tokenizer: "
        "make one of them smaller",
    )


def restore_newest(manager: SnapshotManager, task: Task, trainable: Trainable) -> TrainState | None:
    """Load the newest snapshot into the model, the optimizer and the hooks. A collective.

    Return its train state, or None if there is no snapshot.

    Raises:
        SnapshotError: There are snapshots, but this run cannot resume from any of them.
    """
    snapshot = manager.load_latest(partial(check_state, task=task))
    if snapshot is None:
        return None
    manager.runtime.resume_precision(task.config, snapshot.state)
    snapshot = manager.read_shards(snapshot, trainable.model, trainable.optimizer)
    return restore(snapshot, trainable, manager.runtime.scaler)


def restore(snapshot: Snapshot, trainable: Trainable, scaler: GradScaler) -> TrainState:
    """Load a snapshot into the model, the optimizer, the hooks and the gradient scaler.

    Return its train state.

    Args:
        snapshot: A snapshot that `check_state` has accepted.
        trainable: The objects to load it into.
        scaler: The gradient scaler to load it into.
    """
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
    """Return the fields of a train state for a state.json.

    JSON has no NaN and no infinity, so a metric that is not finite becomes a text.
    """
    values = asdict(state)
    for key in METRIC_FIELDS:
        for name, value in values[key].items():
            values[key][name] = value if math.isfinite(value) else str(value)
    return values


def read_train_state(state: Any) -> TrainState:
    """Return the train state in a state.json, without fields added by later versions."""
    names = {each.name for each in fields(TrainState)}
    known = {key: value for key, value in state["train_state"].items() if key in names}
    for key in METRIC_FIELDS:
        if key in known:
            known[key] = {name: _decode(value) for name, value in known[key].items()}
    return build(TrainState, known, "train_state")


def _decode(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


@dataclass(frozen=True)
class RecordedSnapshot:
    """The snapshot that a run resumes from, without its tensors."""

    step: int
    # Content of state.json. It is untrusted, except for the values that the properties below read.
    state: dict[str, Any]

    @property
    def batch_size(self) -> int:
        return int(self.state["config"]["trainer"]["batch_size"])

    @property
    def micro_batch_size(self) -> int:
        return int(self.state["micro_batch_size"])

    @property
    def train_state(self) -> TrainState:
        return read_train_state(self.state)


def read_recorded(
    store: SnapshotStore, directory: Path, source: str | None, group: ProcessGroup
) -> RecordedSnapshot | None:
    """Read the snapshot that the run resumes from, without its tensors. A collective.

    Return None if there is no snapshot.

    Args:
        store: Store of the snapshots of this run.
        directory: The run directory.
        source: The run to continue from if this run has no snapshot of its own. None if there is no
            such run.
        group: The process group.

    Raises:
        SnapshotError: The snapshot cannot be read, or it has an invalid batch size or train state.
    """

    def read() -> dict[str, Any] | None:
        newest = snapshot_to_resume(store, directory, source, REQUIRED_KINDS)
        if newest is None:
            return None
        try:
            sizes = (
                newest.state["config"]["trainer"]["batch_size"],
                newest.state["micro_batch_size"],
            )
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"its batch sizes are {sizes[0]} and {sizes[1]}")
            read_train_state(newest.state)
        except INVALID_STATE_ERRORS as error:
            raise _invalid_state(newest.step, error) from error
        return {"step": newest.step, "state": newest.state}

    values = group.run_on_rank_zero(read)
    return None if values is None else RecordedSnapshot(**values)


def _invalid_state(step: int, error: Exception) -> SnapshotError:
    return SnapshotError(
        f"the snapshot of step {step} has an invalid state: {str(error)[:300]}; choose another "
        "run.name, or run.resume=never"
    )


def check_state(step: int, state: Any, task: Task) -> None:
    """Refuse a snapshot that this run cannot resume from.

    Args:
        step: Step of the snapshot.
        state: The untrusted content of its state.json.
        task: The task of this run.

    Raises:
        SnapshotError: The task, model, data or data order differs between the snapshot and this
            run, or the state of the snapshot is invalid.
    """
    config = task.config
    try:
        old = _recorded_settings(step, state, config)
    except INVALID_STATE_ERRORS as error:
        raise _invalid_state(step, error) from error
    new = flatten(config.to_dict())
    new[DATA_SHA256] = task.sha256[:16]
    differences = []
    for key in [*identity_keys(config.to_dict()), DATA_SHA256]:
        if old.get(key) != new.get(key):
            old_value = str(old.get(key))[:100]
            differences.append(f"{key} ({old_value} in the snapshot, {new.get(key)} now)")
    if not differences:
        return
    advice = "or choose another run.name, or run.resume=never"
    if config.run.source is not None:  # this run would continue the training of another run
        advice = f"or write run.init_from={config.run.source} to start from its weights alone"
    raise SnapshotError(
        f"the snapshot of step {step} was saved with other settings: {', '.join(differences)}; "
        f"use the old settings, {advice}"
    )


def _recorded_settings(step: int, state: Any, config: Config) -> dict[str, Any]:
    """Return the settings in a state.json by dotted key, and the SHA-256 of the data.

    Raises:
        One of INVALID_STATE_ERRORS: The state is invalid, or it belongs to another step.
    """
    # The keys of ddp may differ between versions, and do not matter here.
    recorded = {**without_unknown(state["config"]), "ddp": config.to_dict()["ddp"]}
    # The schedule does not matter either. The user's code may have registered it, and this code may
    # be missing now.
    recorded["optimizer"] = {
        **recorded["optimizer"],
        "schedule": config.optimizer.schedule,
        "schedule_settings": config.optimizer.schedule_settings,
    }
    # A recorded model or optimizer may not be registered any more. Then it differs from this run's
    # model or optimizer, and `check_state` finds the difference without the defaults, too.
    with contextlib.suppress(NotRegisteredError):
        recorded = from_mapping(recorded).to_dict()  # adds the defaults of newer keys
    micro_batch_size = state["micro_batch_size"]
    is_multiple = recorded["trainer"]["batch_size"] % micro_batch_size == 0
    if read_train_state(state).step != step or not is_multiple:
        recorded_step = state["train_state"]["step"]
        raise ValueError(f"it records step {recorded_step} and micro_batch_size={micro_batch_size}")
    settings = flatten(recorded)
    settings[DATA_SHA256] = recorded_sha256(state)[:16]
    return settings


def identity_keys(config: dict[str, Any]) -> list[str]:
    """List the keys whose values must match for a run to resume from a snapshot."""
    keys = [f"model.{key}" for key in config["model"] if key not in FREE_MODEL_KEYS]
    for key in keys_in_name(config):
        if key.startswith(("task.", "data.")) and key not in DATA_SOURCE_KEYS:
            keys.append(key)
    return [*keys, "trainer.batch_size", "optimizer.name", "run.seed", "run.init_sha256"]
