"""The stages of the start of a run, until its training begins.

Each stage is a collective. Its result (history, inputs, run) is the input of later stages.
"""

import contextlib
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mingpt_ddp.config.builders import chosen_sha256
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import Job
from mingpt_ddp.config.user_code import uses_user_code
from mingpt_ddp.data.dataloader import Loader, plan_batches, with_batch_size
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.jsonl import METRICS, HistoryEnd, read_end
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.metrics.trackers.sending import Sender, open_senders
from mingpt_ddp.process import logs
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.read.warm_start import WarmStart, warm_start
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.code_identity import Code, recorded_code
from mingpt_ddp.storage.lock import LOCK_WAIT_S
from mingpt_ddp.storage.run_directory import (
    RunDirectory,
    check_record,
    difference,
    has_ended,
    read_result,
    recorded_config,
    refuse_other_loop,
    script_files,
)
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.recorded_text import with_recorded_format
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.dry_run.user_code import check_user_code
from mingpt_ddp.training.length import RunLength, check_minutes
from mingpt_ddp.training.memory import SMALLER_MODEL_ADVICE, refuse_out_of_memory
from mingpt_ddp.training.saves.resume import (
    RecordedSnapshot,
    check_state,
    check_state_size,
    read_recorded,
    restore,
)
from mingpt_ddp.training.start.start_log import (
    log_changes,
    log_code,
    log_start,
    warn_of_lost_snapshots,
    warn_of_unused_changes,
)
from mingpt_ddp.training.train_state import (
    TrainState,
    has_stopped_early,
    record_evaluation,
)
from mingpt_ddp.training.trainable import Run, Trainable, build_trainable

# Keys of ddp that may differ between ranks.
PER_NODE_DDP_KEYS = ("nproc_per_node", "launcher", "max_restarts")


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run. All of them have been checked, and nothing has been written yet."""

    runtime: Runtime
    task: Task
    loader: Loader
    warm: WarmStart  # the weights of another run to start from (run.init_from)


@dataclass(frozen=True)
class History:
    """The run directory and the records that earlier starts of the run have left there.

    On ranks other than zero, `locked_directory` and `end` are None.
    """

    directory: Path
    store: SnapshotStore  # store of the run's snapshots
    locked_directory: RunDirectory | None = None  # holds the lock, and writes the files
    end: HistoryEnd | None = None  # end of metrics.jsonl
    script: Path | None = None  # the script whose own loop trains the run; None for main.py


def open_directory(
    job: Job, runtime: Runtime, resources: contextlib.ExitStack, script: Path | None = None
) -> History:
    """Lock the run directory and the directory of its snapshots. A collective.

    No other process changes the run from here on. A start that is refused leaves no new
    directory behind.

    Args:
        job: The job that trains the run.
        runtime: The runtime of this rank.
        resources: Releases the locks when it is closed.
        script: The user's script whose own loop trains the run. None for the loop of main.py.

    Raises:
        ConfigError: A different training loop has trained the run: of main.py, or of a script.
    """
    config = job.config
    _check_same_config(config, runtime)
    directory = job.directory
    store = snapshot_store(config, directory)

    def lock() -> History:
        locked_directory = RunDirectory(
            directory, wait_s=min(LOCK_WAIT_S, config.ddp.timeout_s / 2)
        )
        resources.callback(locked_directory.release)
        refuse_other_loop(directory, script)
        locked_directory.lock_snapshots(store.storage)
        if lease := locked_directory.leases.get(store.url):
            store.hold(lease)
        store.check_owner = locked_directory.check
        return History(directory, store, locked_directory, read_end(directory / METRICS), script)

    return runtime.group.keep_on_rank_zero(lock) or History(directory, store, script=script)


def prepare(
    job: Job,
    runtime: Runtime,
    history: History,
    resources: contextlib.ExitStack,
) -> Inputs:
    """Read the data and the snapshot to resume from. Check them before the run writes anything.

    Args:
        job: The job that trains the run.
        runtime: The runtime of this rank.
        history: The run directory and its snapshots.
        resources: Closes the loader when it is closed.
    """
    config = job.config
    command_line_keys = job.command_line_keys
    group = runtime.group
    recorded = read_recorded(history.store, history.directory, config.run.source, group)
    state = recorded.state if recorded else None
    warm = warm_start(config, state, command_line_keys, group)
    batch_size = recorded.batch_size if recorded else None
    config = with_batch_size(warm.config, group.data_size, batch_size)
    config = with_recorded_format(config, state, command_line_keys)
    runtime.resume_precision(config, state)
    task = build_task(config, group, warm.initial_state, recorded_state=state)
    with task.discarded_if_refused():
        loader = task.train_loader(runtime.device)
        resources.callback(loader.close)
        inputs = Inputs(runtime, task, loader, warm)
        _preflight(inputs, recorded, job)
    return inputs


def _check_same_config(config: Config, runtime: Runtime) -> None:
    """Refuse ranks with different configurations, which the user may have started by hand."""
    values = config.to_dict()
    values["ddp"] = {
        key: value for key, value in values["ddp"].items() if key not in PER_NODE_DDP_KEYS
    }
    for name, sha256 in chosen_sha256().items():
        if code := values[name].get("code"):
            values[name]["code"] = f"{code} ({sha256:.12})"

    def refuse(configs: list[dict[str, Any]]) -> None:
        for rank, other in enumerate(configs):
            if differences := difference(configs[0], other):
                raise ConfigError(
                    f"rank {rank} has a different configuration than rank 0: "
                    f"{', '.join(differences)}; start all ranks with the same settings"
                )

    runtime.group.check_agreement(values, refuse)


def snapshot_store(config: Config, directory: Path) -> SnapshotStore:
    """Return the store of a run's snapshots.

    The store is in the run directory. If snapshot.path is set, the store is in a directory with the
    name of the run below snapshot.path.
    """
    path = config.snapshot.path
    if path is None:
        return SnapshotStore(str(directory / "snapshots"))
    name = directory.relative_to(config.run.root).as_posix()
    return SnapshotStore(f"{path.removesuffix('/')}/{name}")


def _preflight(inputs: Inputs, recorded: RecordedSnapshot | None, job: Job) -> None:
    """Check the batch size, the snapshot, the initial weights and the user's code.

    Also check that a later start could read the records of this run.
    """
    runtime = inputs.runtime
    task = inputs.task
    config = task.config
    group = runtime.group
    check_minutes(config)
    train_state = recorded.train_state if recorded else None
    length = RunLength(config, inputs.loader.steps_per_epoch, train_state)
    # A complete run trains no more batches, so its micro-batches do not matter.
    resumes = recorded is not None and recorded.step < length.steps
    recorded_size = recorded.micro_batch_size if recorded is not None and resumes else None
    plan = plan_batches(config, group.data_size, recorded_size)

    def check_files() -> None:
        check_record(config.to_dict(), job.hydra_files)
        if recorded is None:
            check_state_size(task)
        else:
            check_state(recorded.step, recorded.state, task)
        inputs.warm.check(task.build_model, task.shape)

    group.run_on_rank_zero(check_files)
    state = recorded.state if recorded is not None and resumes else None
    runtime.strategy.check_start(plan.micro_batch_size, state)
    if uses_user_code(config):
        check_user_code(runtime, task, inputs.loader, plan)


def build(inputs: Inputs, history: History, code: Callable[[], Code] | None = None) -> Run:
    """Build the model and its optimizer, and load the newest snapshot if there is one.

    Args:
        inputs: The inputs of the run.
        history: The run directory and its snapshots.
        code: Waits until the source code of this start has been read, and returns it. None on ranks
            other than zero.
    """
    runtime = inputs.runtime
    task = inputs.task
    config = task.config
    logs.to_file(history.directory, runtime.group.env)
    snapshots = SnapshotManager(config, runtime, history.store, history.directory)
    snapshot = snapshots.load_latest(partial(check_state, task=task))
    initialize = None if snapshot else partial(inputs.warm.load_into, runtime.group)
    with refuse_out_of_memory(
        config, runtime, f"the model {config.model.name}", SMALLER_MODEL_ADVICE
    ):
        trainable = build_trainable(runtime, task, initialize)
    return resume(runtime, task, inputs.loader, trainable, history, snapshots, snapshot, code)


def resume(
    runtime: Runtime,
    task: Task,
    loader: Loader,
    trainable: Trainable,
    history: History,
    snapshots: SnapshotManager,
    snapshot: Snapshot | None,
    code: Callable[[], Code] | None,
) -> Run:
    """Load a snapshot into the model and its optimizer. Return the run.

    Args:
        runtime: The runtime of this rank.
        task: The task of the run.
        loader: The loader of the training split.
        trainable: The model, its optimizer and its hooks.
        history: The run directory and its records.
        snapshots: The snapshots of the run.
        snapshot: Result of `snapshots.load_latest`. None to begin at step 0.
        code: Waits until the source code of this start has been read, and returns it. None on ranks
            other than zero.
    """
    directory = history.directory
    state = TrainState()
    if snapshot:
        snapshot = snapshots.read_shards(snapshot, trainable.model, trainable.optimizer)
        state = restore(snapshot, trainable, runtime.scaler)
    length = RunLength(task.config, loader.steps_per_epoch, state)
    if steps := length.steps_from_pace(state.step):
        length.fix(steps, state.step)
    if history.script and runtime.group.run_on_rank_zero(
        lambda: _script_has_ended(directory, task.config, state.step)
    ):
        length.stopped_at = state.step
    _record_last_evaluation(length, history.end, runtime.group)
    log_start(runtime, task, trainable.model, directory, length)
    resumed = snapshot.state if snapshot else {}
    is_complete = _is_complete(length, history.end, runtime.group)
    record = recorded_code(resumed)
    if code and is_complete:
        record = recorded_code(read_result(directory)) or record
    elif code:
        record = code().record_in(directory, record)
    return Run(
        runtime,
        task,
        loader,
        directory,
        trainable,
        length,
        snapshots,
        resumed,
        record,
        is_complete,
    )


def _record_last_evaluation(length: RunLength, end: HistoryEnd | None, group: ProcessGroup) -> None:
    """Take the evaluation of this step from metrics.jsonl, if it is there but not in the snapshot.

    This happens if a signal came between the last step and its evaluation. The next start then
    evaluated the step, but had no reason to save it again. A collective.

    Args:
        length: The number of steps, and the train state.
        end: The end of metrics.jsonl. None on ranks other than zero.
        group: The process group.
    """
    state = length.state
    every = length.trainer.eval_every or length.steps
    is_due = state.step % every == 0 or state.step == length.steps
    if state.step == 0 or not is_due or state.val_step == state.step:
        return
    metrics = group.run_on_rank_zero(lambda: _last_evaluation(end, state.step))
    if "loss" in metrics:
        record_evaluation(state, metrics, length.trainer.min_delta)


def _last_evaluation(end: HistoryEnd | None, step: int) -> dict[str, float]:
    """Read the metrics of the validation split from the end of metrics.jsonl.

    Return {} if the run did not end at this step.
    """
    values = {}
    if end is not None and end.is_complete and end.step == step:
        for tag, value in end.metrics.items():
            if tag.startswith("val/"):
                values[tag.removeprefix("val/")] = value
    return values


def _script_has_ended(directory: Path, config: Config, step: int) -> bool:
    """Return True if a loop of the user's own has ended the run at this step, perhaps early."""
    result = read_result(directory)
    recorded = recorded_config(directory) or {}
    return result.get("step") == step and has_ended(result, recorded, config)


def _is_complete(length: RunLength, end: HistoryEnd | None, group: ProcessGroup) -> bool:
    """Return True if there is nothing left to train or to evaluate.

    If the process was killed after the last snapshot, metrics.jsonl lacks the end of the run. Such
    a run is not complete.
    """
    state = length.state
    if state.step > length.steps or length.stopped_at is not None:
        return True
    has_evaluated_last = state.step == state.val_step == length.steps
    if not has_evaluated_last and not has_stopped_early(state, length.trainer.patience):
        return False
    # If the snapshot was read from outside the run directory, there may be no metrics.jsonl. Then
    # `end` is None.
    return group.run_on_rank_zero(lambda: end is None or end.is_complete)


def record_start(run: Run, history: History, job: Job, code: Callable[[], Code] | None) -> None:
    """Write the configuration to the run directory. Log the differences from earlier starts.

    The files of a complete run are not changed.

    Args:
        run: The run that starts.
        history: The run directory and its records.
        job: The job that trains the run.
        code: Waits until the source code of this start has been read, and returns it. None on ranks
            other than zero.
    """
    if history.locked_directory is None:
        return
    config = run.config
    previous = recorded_config(history.locked_directory.path)
    if previous and run.is_complete:
        warn_of_unused_changes(previous, config)
    else:
        files = {name: text.encode() for name, text in run.task.files().items()}
        private = {}
        if code and not run.is_complete and (patch := code().patch):
            private[run.code["patch"]] = patch
        if history.script:
            private |= script_files(history.script, sys.argv[1:])
        history.locked_directory.record_start(config.to_dict(), job.hydra_files, files, private)
    if run.is_complete:
        return
    log_code(run.code, run.resumed, run.state.step)
    if run.resumed or previous:
        log_changes(run.resumed or {"config": previous}, run)
    if not run.resumed:
        warn_of_lost_snapshots(history.end)


def record_attempt(run: Run, history: History, times: StartTimes) -> None:
    """Record that this start of the run begins to train. Delete the result of an earlier start."""
    state = run.state
    state.world_size = run.runtime.group.world_size
    first_start = history.end.first_start if history.end else None
    state.begin_attempt(
        times.elapsed, first_start, has_own_snapshot=run.snapshots.last_step is not None
    )
    if history.locked_directory:
        history.locked_directory.clear_result()


def open_trackers(run: Run) -> list[Sender]:
    """Open the trackers of a run. Return a sender for each, or [] on ranks other than zero.

    A run keeps its id at the trackers as long as it has its own snapshots.
    """
    state = run.state
    has_own_snapshots = run.snapshots.last_step is not None
    if not has_own_snapshots or not state.run_id:
        state.run_id = uuid.uuid4().hex[:12]
    open_all = partial(open_senders, run.config, run.directory, state.run_id)
    return run.runtime.group.env.call_on_rank_zero(open_all) or []
