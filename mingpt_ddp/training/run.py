"""One training run. Read me first: the objects of a run are built here, in the order the data flows."""

import contextlib
import logging
import time
import uuid
from collections.abc import Container
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import uses_user_code
from mingpt_ddp.data.dataloader import Loader, plan_batches
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, DataError
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.profile import snapshot_when_out_of_memory
from mingpt_ddp.metrics.trackers.outbox import Outbox
from mingpt_ddp.metrics.trackers.outboxes import open_outboxes, send_rest
from mingpt_ddp.snapshots.load import load
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import LOCK_WAIT_S, RunDirectory, RunStatus, difference, recorded_config, run_directory
from mingpt_ddp.storage.urls import open_storage
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.hooks import Hooks
from mingpt_ddp.training.preflight import (
    RecordedBatch,
    check_fits,
    check_resumes_exactly,
    recorded_batch,
    with_batch_size,
)
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.start_log import log_changes, log_start, warn_of_lost_snapshots, warn_of_unused_changes
from mingpt_ddp.training.train_state import Context, TrainState, check_state, has_stopped_early, restore
from mingpt_ddp.training.train_step import TrainStep, build_model_and_optimizer, count_steps, sample
from mingpt_ddp.training.trainer import Trainer
from mingpt_ddp.training.trial_pruning import MedianPruner
from mingpt_ddp.training.warm_start import WarmStart, warm_start
from mingpt_ddp.training.weight_average import WeightAverage

log = logging.getLogger(__name__)

MIN_GOODPUT_S = 600.0  # shorter runs are dominated by startup
PER_NODE = ("nproc_per_node", "launcher", "max_restarts")  # keys of ddp that may differ between ranks


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: SignalHandler | None = None,
    started_at: float | None = None,
    typed: Container[str] = (),
) -> float | None:
    """Train to the limits of `config`, from the newest snapshot if there is one.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        interrupt: handler of the signals that may end the run early; None: no handler.
        started_at: time.monotonic() when this attempt began; None: when the process did.
        typed: the keys that the command line sets.

    Returns:
        The last validation loss, or None if a signal ended the run early.
    """
    interrupt, started_at = interrupt or SignalHandler(), started_at or process_start_time()
    _check_same_config(config, runtime)
    directory = run_directory(config)
    stores = [SnapshotStore(url) for url in snapshot_urls(config, directory)]
    recorded = runtime.group.run_on_rank_zero(partial(recorded_batch, config, stores))
    warm = warm_start(config, recorded[-1], typed, runtime.group)
    config = with_batch_size(warm.config if warm else config, runtime.group.data_size, recorded[0])
    task = build_task(config, runtime.group, warm.state if warm else {}, kept=recorded[-1])
    loader = task.train_loader(runtime.device)
    steps = count_steps(config, loader.steps_per_epoch)
    _preflight(runtime, task, loader, recorded, warm)  # refuses before anything is written

    with contextlib.ExitStack() as resources:
        resources.callback(loader.close)
        owner = _lock_directory(config, runtime, directory, stores, resources)
        last_log_time = owner.last_log_time() if owner else 0.0
        logs.to_file(directory, runtime.group.env)
        manager = SnapshotManager(config, runtime, stores, directory)
        snapshot = manager.load_latest(partial(check_state, task=task))

        initialize = partial(warm.load_into, runtime.group) if warm and not snapshot else None
        model, optimizer = build_model_and_optimizer(runtime, task, runtime.strategy, initialize)
        snapshot = snapshot and manager.read_shards(snapshot, model, optimizer)
        average = WeightAverage(model, config.trainer.ema)
        state = restore(snapshot, model, optimizer, runtime.scaler, average) if snapshot else TrainState()
        evaluator, hooks = Evaluator(task, runtime), Hooks(runtime.group.env)
        log_start(runtime, task, model, directory, range(state.step, steps))

        at_end = state.step == state.val_step == steps or has_stopped_early(state, config.trainer.patience)
        is_complete = state.step > steps or (at_end and _has_ended(directory, runtime))
        previous = recorded_config(directory) if owner else None
        if owner and not (is_complete and previous):
            owner.record_start(config.to_dict(), hydra_files, task.files())
        outboxes = _open_outboxes(config, runtime, directory, state, manager.last_step)
        for outbox in outboxes:
            outbox.start(state.step, runtime.group.world_size)
            resources.callback(outbox.close)
        if is_complete:
            status = RunStatus.COMPLETE
            if previous:
                warn_of_unused_changes(previous, config)
            with average.applied():
                test_metrics = _measure(runtime, task, model, state, evaluator)
        else:
            if owner and snapshot:
                log_changes(snapshot, config, runtime, loader.steps_per_epoch)
            elif owner:
                warn_of_lost_snapshots(directory)
            micro_batch_size = snapshot.state["micro_batch_size"] if snapshot else None
            plan = plan_batches(config, runtime.group.data_size, micro_batch_size)
            state.world_size = runtime.group.world_size
            undone = max(0.0, last_log_time - state.saved_at) if state.saved_at else 0.0
            state.wasted_seconds += undone + time.monotonic() - started_at
            train_step = TrainStep(runtime, task, loader, plan, model, optimizer)
            metrics = MetricsProcessor(runtime, task, loader, model, range(state.step, steps), started_at)
            metrics.attach(outboxes)
            pruner = MedianPruner(config, runtime, directory)
            context = Context(config, runtime, state, metrics, pruner, interrupt, average)
            saves = SaveSchedule(context, manager, train_step)
            trainer = Trainer(context, saves, evaluator, hooks)
            if owner:
                owner.clear_result()
            with snapshot_when_out_of_memory(config, runtime):
                status = trainer.fit()
            state, test_metrics = context.state, trainer.test_metrics

        if owner:
            result = _result(state, task, loader, status, test_metrics)
            owner.write_result(result)
            if status is not RunStatus.PREEMPTED:
                send_rest(outboxes, state.step, result)
                if not is_complete:
                    hooks.call("end", result)
            if status is RunStatus.COMPLETE:
                _log_end(state, task, directory, test_metrics)
    return None if status is RunStatus.PREEMPTED else state.val_loss


def _measure(
    runtime: Runtime, task: Task, model: nn.Module, state: TrainState, evaluator: Evaluator
) -> dict[str, float]:
    """Evaluate a complete run where that is missing, and log a sample; return the metrics of the test split."""
    if state.val_step != state.step or not state.val_metrics:  # saved between two, under a larger limit
        state.val_metrics = evaluator.run(model, "val") or {}
        state.val_loss = state.val_metrics["loss"]
    if text := sample(runtime, task, model, state.step):
        log.info("a sample:\n%s\n", text)
    return evaluator.run(model, "test") or {}


def snapshot_urls(config: Config, directory: Path) -> list[str]:
    """Return the URLs of the run's snapshots: in the run directory, or in snapshot.path below the run's name.

    With snapshot.fallback_path a second URL follows.
    """
    name = directory.relative_to(config.run.root).as_posix()
    paths = [config.snapshot.path, config.snapshot.fallback_path]
    below = [f"{path}{name}" if path.endswith("/") else f"{path}/{name}" for path in paths if path is not None]
    return below if config.snapshot.path is not None else [str(directory / "snapshots"), *below]


def _check_same_config(config: Config, runtime: Runtime) -> None:
    """Refuse ranks that were started by hand with different overrides."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_NODE}
    configs = runtime.group.all_gather(values)
    for rank, other in enumerate(configs):
        if differences := difference(configs[0], other):
            raise ConfigError(f"rank {rank} has another configuration than rank 0: {'; '.join(differences)}")


def _preflight(runtime: Runtime, task: Task, loader: Loader, recorded: RecordedBatch, warm: WarmStart | None) -> None:
    """Check the batch, the snapshot, the weights to start from, the memory and the user's code. A collective."""
    config, (_, micro_batch_size, step, source, _) = task.config, recorded
    is_resumed = step < count_steps(config, loader.steps_per_epoch)
    plan = plan_batches(config, runtime.group.data_size, micro_batch_size if is_resumed else None)

    def check_source() -> None:
        if source is not None:
            snapshot = load(source)
            check_state(snapshot.step, snapshot.state, task)
        if warm is not None:
            warm.check(task)

    runtime.group.run_on_rank_zero(check_source)
    check_fits(config, runtime, task)
    if uses_user_code(config):
        first = partial(loader.get_batch, 1, plan, 0)
        runtime.group.run_on_rank_zero(lambda: check_resumes_exactly(runtime, task, first()[0].batch))


def _has_ended(directory: Path, runtime: Runtime) -> bool:
    """Return whether metrics.jsonl has the end of the run, which a kill after the last snapshot prevents."""

    def read() -> bool:
        with contextlib.suppress(OSError, DataError):
            return read_history(directory / METRICS).is_complete
        return True  # resumed from a snapshot elsewhere

    return runtime.group.run_on_rank_zero(read)


def _lock_directory(
    config: Config, runtime: Runtime, directory: Path, stores: list[SnapshotStore], resources: contextlib.ExitStack
) -> RunDirectory | None:
    """Lock the run directory and those of its snapshots until `resources` is closed; return the owner on rank zero."""
    owner: RunDirectory | None = None

    def lock() -> None:
        nonlocal owner
        owner = RunDirectory(directory, wait_s=min(LOCK_WAIT_S, config.ddp.timeout_s / 2))
        resources.callback(owner.release)
        for store in stores:
            owner.lock_snapshots(open_storage(store.url))
            store.lease = owner.leases.get(store.url)

    runtime.group.run_on_rank_zero(lock)
    return owner


def _open_outboxes(
    config: Config, runtime: Runtime, directory: Path, state: TrainState, last_saved: int | None
) -> list[Outbox]:
    """Return the outboxes of rank zero. A run keeps the id that its own snapshots have recorded."""
    known = last_saved is not None and state.run_id
    state.run_id = known or uuid.uuid4().hex[:12]
    opened = partial(open_outboxes, config, directory, state.run_id, state.step, state.step if known else 0)
    return runtime.group.env.call_on_rank_zero(opened) or []


def _log_end(state: TrainState, task: Task, directory: Path, test_metrics: dict[str, float]) -> None:
    total_s = state.wall_seconds + state.wasted_seconds
    elapsed = timedelta(seconds=round(total_s))
    if total_s >= MIN_GOODPUT_S:
        lost = timedelta(seconds=round(state.stall_seconds + state.wasted_seconds))
        causes = "startup, stalls for snapshots and repeated steps"
        log.info("goodput %.1f%%: %s took %s of %s", 100 * state.goodput, causes, lost, elapsed)
    values = f"validation {task.describe(state.val_metrics)}"
    if test_metrics:
        values += f"; test {task.describe(test_metrics)}"
    log.info("done: %s after %d steps and %s; the run is in %s", values, state.step, elapsed, directory)


def _result(
    state: TrainState, task: Task, loader: Loader, status: RunStatus, test_metrics: dict[str, float]
) -> dict[str, Any]:
    early = has_stopped_early(state, task.config.trainer.patience) and status is RunStatus.COMPLETE
    early &= state.step < count_steps(task.config, loader.steps_per_epoch)
    return {
        "status": status.value,
        **({"stopped_early": True} if early else {}),
        "step": state.step,
        "epoch": state.step / loader.steps_per_epoch,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        **{f"val_{name}": value for name, value in state.val_metrics.items()},
        **{f"test_{name}": value for name, value in test_metrics.items()},
        **{name: state.val_metrics[name] for name in task.comparable if name in state.val_metrics},
        "best_val_loss": state.best_val_loss,
        task.unit: state.step * loader.items_per_step,
        "wall_seconds": state.wall_seconds,
        "goodput": state.goodput,
        "world_size": state.world_size,
    }
