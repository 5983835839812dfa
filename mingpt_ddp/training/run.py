"""One training run.

Read me first: the objects of a run are built here, in the order the data flows.
"""

import contextlib
import logging
import math
import time
import uuid
from collections.abc import Container
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import uses_user_code
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError, DataError
from mingpt_ddp.metrics.jsonl import METRICS, read_history
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.profile import snapshot_when_out_of_memory
from mingpt_ddp.metrics.trackers.outboxes import open_outboxes, send_rest
from mingpt_ddp.snapshots.load import load
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import (
    LOCK_WAIT_S,
    RunDirectory,
    RunStatus,
    difference,
    recorded_config,
    run_directory,
)
from mingpt_ddp.storage.urls import open_storage
from mingpt_ddp.tasks import build_task
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluator import Evaluator
from mingpt_ddp.training.hooks import Hooks
from mingpt_ddp.training.preflight import (
    RecordedBatch,
    check_directories,
    check_fits,
    check_resumes_exactly,
    recorded_batch,
    with_batch_size,
)
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.start_log import (
    log_changes,
    log_start,
    warn_of_lost_snapshots,
    warn_of_unused_changes,
)
from mingpt_ddp.training.train_state import (
    Context,
    TrainState,
    check_state,
    has_stopped_early,
    record_last_evaluation,
    restore,
)
from mingpt_ddp.training.train_step import TrainStep, build_model_and_optimizer, count_steps, sample
from mingpt_ddp.training.trainer import Trainer
from mingpt_ddp.training.trial_pruning import MedianPruner
from mingpt_ddp.training.warm_start import warm_start
from mingpt_ddp.training.weight_average import WeightAverage

log = logging.getLogger(__name__)

MIN_GOODPUT_S = 600.0  # shorter runs are dominated by startup
# keys of ddp that may differ between ranks
PER_NODE = ("nproc_per_node", "launcher", "max_restarts")


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: SignalHandler | None = None,
    started_at: float | None = None,
    typed: Container[str] = (),
    metric: str = "loss",
) -> float | None:
    """Train to the limits of `config`, from the newest snapshot if there is one.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        interrupt: handler of the signals that may end the run early; None: no handler.
        started_at: time.monotonic() when this attempt began; None: when the process did.
        typed: the keys that the command line sets.
        metric: of the validation split, to return.

    Returns:
        The last validation loss, or other metric (infinity if the task has none of this name); None
        if a signal ended the run early.
    """
    # refuses before anything is written
    attempt = Attempt(config, runtime, typed, started_at or process_start_time())
    with contextlib.ExitStack() as resources:
        attempt.lock(resources)
        attempt.build()
        attempt.record_start(hydra_files)
        attempt.open_outboxes(resources)
        status = (
            attempt.measure()
            if attempt.is_complete
            else attempt.train(interrupt or SignalHandler())
        )
        attempt.record_end(status)
    if status is RunStatus.PREEMPTED:
        return None
    return {"loss": attempt.state.val_loss, **attempt.state.val_metrics}.get(metric, math.inf)


class Attempt:
    """One start of a run.

    Its methods build its objects, in the order of the calls in `run`; each is a collective.
    """

    def __init__(
        self, config: Config, runtime: Runtime, typed: Container[str], started_at: float
    ) -> None:
        """Read the data and what the run starts from; check them before anything is written."""
        _check_same_config(config, runtime)
        self.runtime = runtime
        self.started_at = started_at
        self.directory = run_directory(config)
        self.stores = [SnapshotStore(url) for url in snapshot_urls(config, self.directory)]
        runtime.group.run_on_rank_zero(partial(check_directories, self.directory, self.stores))
        recorded = runtime.group.run_on_rank_zero(partial(recorded_batch, config, self.stores))
        self.warm = warm_start(config, recorded[-1], typed, runtime.group)
        self.config = with_batch_size(
            self.warm.config if self.warm else config, runtime.group.data_size, recorded[0]
        )
        self.task = build_task(
            self.config, runtime.group, self.warm.state if self.warm else {}, kept=recorded[-1]
        )
        with self.task.discarded_if_refused():
            self.loader = self.task.train_loader(runtime.device)
            self.steps = count_steps(self.config, self.loader.steps_per_epoch)
            self._preflight(recorded)

    def _preflight(self, recorded: RecordedBatch) -> None:
        """Check the batch, the snapshot, the weights to start from, the memory and the user's
        code.
        """
        _, micro_batch_size, step, source, _ = recorded
        group = self.runtime.group
        plan = plan_batches(
            self.config, group.data_size, micro_batch_size if step < self.steps else None
        )

        def check_source() -> None:
            if source is not None:
                snapshot = load(source)
                check_state(snapshot.step, snapshot.state, self.task)
            if self.warm is not None:
                self.warm.check(self.task)

        group.run_on_rank_zero(check_source)
        check_fits(self.config, self.runtime, self.task)
        if uses_user_code(self.config):
            first = partial(self.loader.get_batch, 1, plan, 0)
            group.run_on_rank_zero(
                lambda: check_resumes_exactly(self.runtime, self.task, first()[0].batch)
            )

    def lock(self, resources: contextlib.ExitStack) -> None:
        """Lock the run directory and those of its snapshots until `resources` is closed; begin to
        log there.
        """
        resources.callback(self.loader.close)
        self.owner: RunDirectory | None = None  # on rank zero

        def lock() -> None:
            self.owner = RunDirectory(
                self.directory, wait_s=min(LOCK_WAIT_S, self.config.ddp.timeout_s / 2)
            )
            resources.callback(self.owner.release)
            for store in self.stores:
                self.owner.lock_snapshots(open_storage(store.url))
                store.lease = self.owner.leases.get(store.url)
                store.check_owner = self.owner.check

        with self.task.discarded_if_refused():
            self.runtime.group.run_on_rank_zero(lock)
        # of the attempt before
        self.last_log_time = self.owner.last_log_time() if self.owner else 0.0
        logs.to_file(self.directory, self.runtime.group.env)

    def build(self) -> None:
        """Build what is trained and evaluated, as the newest snapshot has it if there is one."""
        runtime = self.runtime
        task = self.task
        self.manager = SnapshotManager(self.config, runtime, self.stores, self.directory)
        snapshot = self.manager.load_latest(partial(check_state, task=task))
        initialize = (
            partial(self.warm.load_into, runtime.group) if self.warm and not snapshot else None
        )
        model, optimizer = build_model_and_optimizer(runtime, task, runtime.strategy, initialize)
        snapshot = snapshot and self.manager.read_shards(snapshot, model, optimizer)
        average = WeightAverage(model, self.config.trainer.ema)
        state = (
            restore(snapshot, model, optimizer, runtime.scaler, average)
            if snapshot
            else TrainState()
        )
        record_last_evaluation(state, self.config, self.steps, self.directory, runtime.group)
        self.snapshot = snapshot
        self.model = model
        self.optimizer = optimizer
        self.average = average
        self.state = state
        self.evaluator = Evaluator(task, runtime)
        self.hooks = Hooks(runtime.group.env)
        log_start(runtime, task, model, self.directory, range(state.step, self.steps))
        at_end = state.step == state.val_step == self.steps or has_stopped_early(
            state, self.config.trainer.patience
        )
        self.is_complete = state.step > self.steps or (at_end and self._has_ended())

    def _has_ended(self) -> bool:
        """Return whether metrics.jsonl has the end of the run, which a kill after the last snapshot
        prevents.
        """

        def read() -> bool:
            with contextlib.suppress(OSError, DataError):
                return read_history(self.directory / METRICS).is_complete
            return True  # resumed from a snapshot elsewhere

        return self.runtime.group.run_on_rank_zero(read)

    def record_start(self, hydra_files: dict[str, str]) -> None:
        """Record the configuration, unless a complete run has one; log what differs from the
        attempt before.
        """
        if self.owner is None:
            return
        previous = recorded_config(self.directory)
        if previous and self.is_complete:
            warn_of_unused_changes(previous, self.config)
        else:
            self.owner.record_start(self.config.to_dict(), hydra_files, self.task.files())
        if self.snapshot and not self.is_complete:
            log_changes(self.snapshot, self.config, self.runtime, self.loader.steps_per_epoch)
        elif not self.is_complete:
            warn_of_lost_snapshots(self.directory)

    def open_outboxes(self, resources: contextlib.ExitStack) -> None:
        """Open the outboxes of rank zero until `resources` is closed.

        A run keeps the id in its own snapshots.
        """
        state = self.state
        group = self.runtime.group
        step = self.state.step
        known = self.manager.last_step is not None and state.run_id
        state.run_id = known or uuid.uuid4().hex[:12]
        opened = partial(
            open_outboxes, self.config, self.directory, state.run_id, step, step if known else 0
        )
        self.outboxes = group.env.call_on_rank_zero(opened) or []
        for outbox in self.outboxes:
            outbox.start(step, group.world_size)
            resources.callback(outbox.close)

    def measure(self) -> RunStatus:
        """Evaluate a complete run where that is missing, and log a sample."""
        state = self.state
        model = self.model
        with self.average.applied():
            # saved between two, under a larger limit
            if state.val_step != state.step or not state.val_metrics:
                state.val_metrics = self.evaluator.run(model, "val") or {}
                state.val_loss = state.val_metrics["loss"]
            if text := sample(self.runtime, self.task, model, state.step):
                log.info("a sample:\n%s\n", text)
            self.test_metrics = self.evaluator.run(model, "test") or {}
        return RunStatus.COMPLETE

    def train(self, interrupt: SignalHandler) -> RunStatus:
        """Train to the limits, or until a signal ends the run early."""
        config = self.config
        runtime = self.runtime
        task = self.task
        loader = self.loader
        state = self.state
        micro_batch_size = self.snapshot.state["micro_batch_size"] if self.snapshot else None
        plan = plan_batches(config, runtime.group.data_size, micro_batch_size)
        state.world_size = runtime.group.world_size
        undone = max(0.0, self.last_log_time - state.saved_at) if state.saved_at else 0.0
        state.wasted_seconds += undone + time.monotonic() - self.started_at
        train_step = TrainStep(runtime, task, loader, plan, self.model, self.optimizer)
        metrics = MetricsProcessor(
            runtime, task, loader, self.model, range(state.step, self.steps), self.started_at
        )
        metrics.attach(self.outboxes)
        pruner = MedianPruner(config, runtime, self.directory)
        context = Context(config, runtime, state, metrics, pruner, interrupt, self.average)
        trainer = Trainer(
            context, SaveSchedule(context, self.manager, train_step), self.evaluator, self.hooks
        )
        if self.owner:
            self.owner.clear_result()
        with snapshot_when_out_of_memory(config, runtime):
            status = trainer.fit()
        self.state = context.state
        self.test_metrics = trainer.test_metrics
        return status

    def record_end(self, status: RunStatus) -> None:
        """Write result.json, complete the trackers, call the hooks of a run that has trained, and
        log the end.
        """
        if self.owner is None:
            return
        result = self._result(status)
        self.owner.write_result(result)
        if status is not RunStatus.PREEMPTED:
            send_rest(self.outboxes, self.state.step, result)
            if not self.is_complete:
                self.hooks.call("end", result)
        if status is RunStatus.COMPLETE:
            _log_end(self.state, self.task, self.directory, self.test_metrics)

    def _result(self, status: RunStatus) -> dict[str, Any]:
        state = self.state
        task = self.task
        loader = self.loader
        early = (
            has_stopped_early(state, self.config.trainer.patience) and status is RunStatus.COMPLETE
        )
        early &= state.step < self.steps
        return {
            "status": status.value,
            **({"stopped_early": True} if early else {}),
            "step": state.step,
            "epoch": state.step / loader.steps_per_epoch,
            "train_loss": state.train_loss,
            "val_loss": state.val_loss,
            **{f"val_{name}": value for name, value in state.val_metrics.items()},
            **{f"test_{name}": value for name, value in self.test_metrics.items()},
            **{
                name: state.val_metrics[name]
                for name in task.comparable
                if name in state.val_metrics
            },
            "best_val_loss": state.best_val_loss,
            task.unit: state.step * loader.items_per_step,
            "wall_seconds": state.wall_seconds,
            "goodput": state.goodput,
            "world_size": state.world_size,
        }


def _check_same_config(config: Config, runtime: Runtime) -> None:
    """Refuse ranks that were started by hand with different overrides."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_NODE}
    configs = runtime.group.all_gather(values)
    for rank, other in enumerate(configs):
        if differences := difference(configs[0], other):
            raise ConfigError(
                f"rank {rank} has another configuration than rank 0: {'; '.join(differences)}"
            )


def snapshot_urls(config: Config, directory: Path) -> list[str]:
    """Return the URLs of the run's snapshots: in the run directory, or in snapshot.path below the
    run's name.

    With snapshot.fallback_path a second URL follows.
    """
    name = directory.relative_to(config.run.root).as_posix()
    paths = [config.snapshot.path, config.snapshot.fallback_path]
    below = [
        f"{path}{name}" if path.endswith("/") else f"{path}/{name}"
        for path in paths
        if path is not None
    ]
    return below if config.snapshot.path is not None else [str(directory / "snapshots"), *below]


def _log_end(
    state: TrainState, task: Task, directory: Path, test_metrics: dict[str, float]
) -> None:
    total_s = state.wall_seconds + state.wasted_seconds
    elapsed = timedelta(seconds=round(total_s))
    if total_s >= MIN_GOODPUT_S:
        lost = timedelta(seconds=round(state.stall_seconds + state.wasted_seconds))
        causes = "startup, stalls for snapshots and repeated steps"
        log.info("goodput %.1f%%: %s took %s of %s", 100 * state.goodput, causes, lost, elapsed)
    values = f"validation {task.describe(state.val_metrics)}"
    if test_metrics:
        values += f"; test {task.describe(test_metrics)}"
    log.info(
        "done: %s after %d steps and %s; the run is in %s", values, state.step, elapsed, directory
    )
