"""The stages of a start of a run, up to the training.

Each is a collective, and returns what the later ones need: inputs, the run's record, its setup.
"""

import contextlib
import uuid
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.user_code import uses_user_code
from mingpt_ddp.data.dataloader import Loader, plan_batches
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.jsonl import METRICS, HistoryEnd, read_end
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.metrics.trackers.outbox import Outbox
from mingpt_ddp.metrics.trackers.outboxes import open_outboxes
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.code_identity import Code, recorded_code
from mingpt_ddp.storage.lock import LOCK_WAIT_S
from mingpt_ddp.storage.run_dir import (
    Attempt,
    RunDirectory,
    difference,
    recorded_config,
    run_directory,
)
from mingpt_ddp.storage.urls import open_storage
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from mingpt_ddp.training.hooks.observers import Hooks
from mingpt_ddp.training.length import RunLength, check_minutes
from mingpt_ddp.training.start.preflight import (
    Recorded,
    check_directories,
    check_fits,
    read_recorded,
    with_batch_size,
)
from mingpt_ddp.training.start.record_checks import (
    check_canonical_start,
    check_records,
    with_recorded_format,
)
from mingpt_ddp.training.start.start_log import (
    log_changes,
    log_code,
    log_start,
    warn_of_lost_snapshots,
    warn_of_unused_changes,
)
from mingpt_ddp.training.start.trial import check_user_code
from mingpt_ddp.training.start.warm_start import WarmStart, warm_start
from mingpt_ddp.training.train_state import (
    TrainState,
    check_state,
    has_stopped_early,
    record_last_evaluation,
    restore,
)
from mingpt_ddp.training.trainable import Trainable, build_trainable

# keys of ddp that may differ between ranks
PER_NODE = ("nproc_per_node", "launcher", "max_restarts")


@dataclass(frozen=True)
class Inputs:
    """What a run needs before anything is written: all of it has been checked."""

    runtime: Runtime
    task: Task
    loader: Loader
    stores: list[SnapshotStore]
    warm: WarmStart | None  # the weights of run.init_from
    times: StartTimes

    @property
    def config(self) -> Config:
        """The configuration, with what the snapshot or the weights to start from determine."""
        return self.task.config

    @cached_property
    def directory(self) -> Path:
        """The run directory; an unnamed run's name is a hash of the whole configuration."""
        return run_directory(self.config)

    def length(self, state: TrainState | None) -> RunLength:
        """Return the number of optimizer steps, of a run with this train state if there is one."""
        return RunLength(self.config, self.loader.steps_per_epoch, state)


@dataclass(frozen=True)
class RunRecord:
    """The run directory, locked, and what the attempts before have left there."""

    owner: RunDirectory | None  # on rank zero
    last: Attempt  # the attempt before, on rank zero
    end: HistoryEnd | None  # of the measurements of the attempts before, on rank zero
    code: Future[Code] | None  # of this attempt, on rank zero


@dataclass(frozen=True)
class Setup:
    """What is trained and evaluated, as the newest snapshot has it if there is one."""

    manager: SnapshotManager
    snapshot: Snapshot | None
    trainable: Trainable
    state: TrainState
    length: RunLength
    evaluator: Evaluator
    is_complete: bool  # there is nothing to train
    code: dict[str, Any]  # the record of what trains, or has trained; on rank zero


@dataclass(frozen=True)
class Listeners:
    """Who receives what happens, besides the run directory."""

    outboxes: list[Outbox]  # of the trackers, on rank zero
    hooks: Hooks  # of the user


def prepare(
    config: Config,
    runtime: Runtime,
    typed: Container[str],
    hydra_files: dict[str, str],
    times: StartTimes,
) -> Inputs:
    """Read the data and what the run starts from; check them before anything is written.

    Args:
        typed: the keys that the command line sets.
        hydra_files: content of `.hydra/`, by file name.
    """
    group = runtime.group
    _check_same_config(config, runtime)
    directory = run_directory(config)
    stores = [SnapshotStore(url) for url in snapshot_urls(config, directory)]
    group.run_on_rank_zero(partial(check_directories, directory, stores))
    recorded = read_recorded(config, stores, group)
    kept = recorded.state if recorded else None
    warm = warm_start(config, kept, typed, group)
    config = with_batch_size(
        warm.config if warm else config, group.data_size, recorded.batch_size if recorded else None
    )
    config = with_recorded_format(config, kept, typed)
    runtime.resume_precision(config, kept)
    task = build_task(config, group, warm.state if warm else {}, kept=kept)
    with task.discarded_if_refused():
        loader = task.train_loader(runtime.device)
        inputs = Inputs(runtime, task, loader, stores, warm, times)
        _preflight(inputs, recorded, hydra_files)
    return inputs


def _check_same_config(config: Config, runtime: Runtime) -> None:
    """Refuse ranks that were started by hand with different overrides."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_NODE}

    def refuse(configs: list[dict[str, Any]]) -> None:
        for rank, other in enumerate(configs):
            if differences := difference(configs[0], other):
                raise ConfigError(
                    f"rank {rank} has another configuration than rank 0: {'; '.join(differences)}"
                )

    runtime.group.check_agreement(values, refuse)


def snapshot_urls(config: Config, directory: Path) -> list[str]:
    """Return the URLs of the run's snapshots, those of its fallbacks last.

    They are in the run directory, or in snapshot.path below the run's name; with
    snapshot.fallback_path a second URL follows.
    """
    name = directory.relative_to(config.run.root).as_posix()
    urls = []
    if config.snapshot.path is None:
        urls.append(str(directory / "snapshots"))
    for path in (config.snapshot.path, config.snapshot.fallback_path):
        if path is not None:
            urls.append(f"{path}{name}" if path.endswith("/") else f"{path}/{name}")
    return urls


def _preflight(inputs: Inputs, recorded: Recorded | None, hydra_files: dict[str, str]) -> None:
    """Check the batch, the snapshot, the weights to start from, the memory and the user's code.

    And that what the run will record can be read again.
    """
    runtime = inputs.runtime
    task = inputs.task
    config = inputs.config
    group = runtime.group
    check_minutes(config)
    length = inputs.length(recorded.train_state if recorded else None)
    # a complete run divides no batch any more
    resumes = recorded is not None and recorded.step < length.steps
    kept_size = recorded.micro_batch_size if recorded is not None and resumes else None
    plan = plan_batches(config, group.data_size, kept_size)

    def check_source() -> None:
        check_records(task, hydra_files, is_new=recorded is None)
        if recorded is not None and recorded.source is not None:
            snapshot = load(recorded.source)
            check_state(snapshot.step, snapshot.state, task)
        if inputs.warm is not None:
            inputs.warm.check(task)

    group.run_on_rank_zero(check_source)
    check_canonical_start(runtime, plan.micro_batch_size, recorded if resumes else None)
    check_fits(config, runtime, task)
    if uses_user_code(config):
        check_user_code(runtime, task, inputs.loader, plan)


def open_directory(
    inputs: Inputs, code: Future[Code] | None, resources: contextlib.ExitStack
) -> RunRecord:
    """Lock the run directory and those of its snapshots; begin to log there.

    Args:
        code: of this attempt, on rank zero.
        resources: releases the locks when it is closed.
    """
    group = inputs.runtime.group
    resources.callback(inputs.loader.close)
    owners: list[RunDirectory] = []  # on rank zero

    def lock() -> None:
        wait_s = min(LOCK_WAIT_S, inputs.config.ddp.timeout_s / 2)
        owner = RunDirectory(inputs.directory, wait_s=wait_s)
        owners.append(owner)
        resources.callback(owner.release)
        for store in inputs.stores:
            owner.lock_snapshots(open_storage(store.url))
            store.lease = owner.leases.get(store.url)
            store.check_owner = owner.check

    with inputs.task.discarded_if_refused():
        group.run_on_rank_zero(lock)
    owner = owners[0] if owners else None
    last = owner.last_attempt(METRICS) if owner else Attempt()
    end = read_end(inputs.directory / METRICS) if owner else None
    logs.to_file(inputs.directory, group.env)
    return RunRecord(owner, last, end, code)


def build(inputs: Inputs, record: RunRecord) -> Setup:
    """Build what is trained and evaluated, as the newest snapshot has it if there is one."""
    runtime = inputs.runtime
    task = inputs.task
    warm = inputs.warm
    manager = SnapshotManager(inputs.config, runtime, inputs.stores, inputs.directory)
    snapshot = manager.load_latest(partial(check_state, task=task))
    initialize = partial(warm.load_into, runtime.group) if warm and not snapshot else None
    trainable = build_trainable(runtime, task, initialize)
    state = TrainState()
    if snapshot:
        snapshot = manager.read_shards(snapshot, trainable.model, trainable.optimizer)
        state = restore(snapshot, trainable, runtime.scaler)
    length = inputs.length(state)
    if steps := length.reckon(state.step):
        length.fix(steps, state.step)
    record_last_evaluation(state, inputs.config, length.steps, record.end, runtime.group)
    evaluator = Evaluator(task, runtime)
    log_start(runtime, task, trainable.model, inputs.directory, length)
    is_complete = _is_complete(inputs, record, length)
    code = recorded_code(snapshot.state if snapshot else None)
    if record.code and not is_complete:
        code = record.code.result().record_in(inputs.directory, code)
    return Setup(manager, snapshot, trainable, state, length, evaluator, is_complete, code)


def _is_complete(inputs: Inputs, record: RunRecord, length: RunLength) -> bool:
    """Return whether there is nothing to train, nor to evaluate at the end.

    A kill after the last snapshot leaves metrics.jsonl without the end of the run.
    """
    state = length.state
    if state.step > length.steps:
        return True
    has_evaluated_last = state.step == state.val_step == length.steps
    if not has_evaluated_last and not has_stopped_early(state, inputs.config.trainer.patience):
        return False
    end = record.end or HistoryEnd(is_complete=True)  # resumed from a snapshot elsewhere
    return inputs.runtime.group.run_on_rank_zero(lambda: end.is_complete)


def record_start(
    inputs: Inputs, record: RunRecord, setup: Setup, hydra_files: dict[str, str]
) -> None:
    """Record the configuration, unless a complete run has one; log what differs from before.

    Args:
        hydra_files: content of `.hydra/`, by file name.
    """
    if record.owner is None:
        return
    config = inputs.config
    previous = recorded_config(inputs.directory)
    if previous and setup.is_complete:
        warn_of_unused_changes(previous, config)
    else:
        files = {name: text.encode() for name, text in inputs.task.files().items()}
        if record.code and not setup.is_complete and (patch := record.code.result().patch):
            files[setup.code["patch"]] = patch
        record.owner.record_start(config.to_dict(), hydra_files, files)
    if setup.is_complete:
        return
    log_code(setup.code, setup.snapshot)
    if setup.snapshot:
        log_changes(setup.snapshot, config, inputs.runtime, setup.length)
    else:
        warn_of_lost_snapshots(record.end, record.last)


def open_listeners(inputs: Inputs, setup: Setup) -> Listeners:
    """Open the outboxes of the trackers; a run keeps its id there in its own snapshots."""
    group = inputs.runtime.group
    state = setup.state
    has_own_snapshots = setup.manager.last_step is not None
    if not has_own_snapshots or not state.run_id:
        state.run_id = uuid.uuid4().hex[:12]
    open_all = partial(open_outboxes, inputs.config, inputs.directory, state.run_id)
    return Listeners(group.env.call_on_rank_zero(open_all) or [], Hooks(group))
