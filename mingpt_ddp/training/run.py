"""One training run. Read me first: its stages, and the objects of the training, in order."""

import contextlib
import logging
from collections.abc import Container

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.channels import Report
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.profile import snapshot_when_out_of_memory
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.storage.run_dir import RunStatus
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.attempts import count_attempt, record_attempt
from mingpt_ddp.training.copy_check import CopyCheck
from mingpt_ddp.training.result import record_end
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.stages import (
    Built,
    Opened,
    Prepared,
    Reports,
    build,
    open_directory,
    open_reports,
    prepare,
    record_start,
)
from mingpt_ddp.training.train_state import Context
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainer import Trained, Trainer
from mingpt_ddp.training.validation import Validation

log = logging.getLogger(__name__)


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: SignalHandler | None = None,
    started_at: float | None = None,
    typed: Container[str] = (),
    report: Report | None = None,
) -> dict[str, float] | None:
    """Train to the limits of `config`, from the newest snapshot if there is one.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        interrupt: handler of the signals that may end the run early; None: no handler.
        started_at: time.monotonic() when this attempt began; None: when the process did.
        typed: the keys that the command line sets.
        report: judges the evaluations of a job of a sweep, on rank zero; None: nothing does.

    Returns:
        The metrics of the last evaluation of the validation split, by name; None if a signal ended
        the run early.
    """
    # refuses before anything is written
    times = StartTimes(started_at or process_start_time())
    times.done("processes", at=runtime.began_at)
    times.done("rendezvous")
    prepared = prepare(config, runtime, typed, hydra_files, times)
    times.done("data")
    with contextlib.ExitStack() as resources:
        opened = open_directory(prepared, resources)
        times.done("run directory")
        built = build(prepared, opened)
        times.done("model and snapshot")
        record_start(prepared, opened, built, hydra_files)
        reports = open_reports(prepared, built)
        if built.is_complete:
            trained = evaluate_complete(built)
        else:
            signals = interrupt or SignalHandler()
            trainer = begin_attempt(prepared, opened, built, reports, signals, report)
            with snapshot_when_out_of_memory(prepared.config, runtime):
                trained = trainer.train()
        record_end(prepared, opened, built, reports, trained)
    if trained.status is RunStatus.PREEMPTED:
        return None
    return built.state.val_metrics


def evaluate_complete(built: Built) -> Trained:
    """Evaluate a complete run where that is missing, and log a sample."""
    state = built.state
    evaluator = built.evaluator
    evaluator.runtime.group.set_activity(f"evaluating after step {state.step}")
    model = built.trainable.model
    with built.trainable.average.applied():
        # saved between two evaluations, under a larger limit
        if state.val_step != state.step or not state.val_metrics:
            state.val_metrics = evaluator.run(model, "val") or {}
            state.val_loss = state.val_metrics["loss"]
        if text := evaluator.sample(model, state.step):
            log.info("a sample:\n%s\n", text)
        test_metrics = evaluator.run(model, "test") or {}
    return Trained(RunStatus.COMPLETE, test_metrics)


def begin_attempt(
    prepared: Prepared,
    opened: Opened,
    built: Built,
    reports: Reports,
    interrupt: SignalHandler,
    report: Report | None,
) -> Trainer:
    """Record that this attempt begins to train; return the loop with all its parts."""
    config = prepared.config
    runtime = prepared.runtime
    task = prepared.task
    loader = prepared.loader
    state = built.state
    state.world_size = runtime.group.world_size
    first_save_s = count_attempt(state, opened.last, prepared.times.began_at, runtime.group.env)
    if opened.owner:
        record_attempt(opened.owner, state, runtime.group.env)
        opened.owner.clear_result()
    kept_size = built.snapshot.state["micro_batch_size"] if built.snapshot else None
    plan = plan_batches(config, runtime.group.data_size, kept_size)

    # first: no clock counts how long it takes to wrap the model
    train_step = TrainStep(runtime, task, loader, plan, built.trainable)
    steps = range(state.step, prepared.steps)
    model = built.trainable.model
    metrics = MetricsProcessor(runtime, task, loader, model, steps, prepared.times)
    metrics.outboxes = reports.outboxes
    context = Context(task, runtime, built.trainable, state, metrics, interrupt)
    anomaly = AnomalyPolicy(context)
    copies = CopyCheck(context)
    saves = SaveSchedule(context, built.manager, anomaly, copies, plan, first_save_s)
    validation = Validation(context, saves, built.evaluator, reports.hooks, report)
    return Trainer(context, train_step, saves, validation, anomaly, reports.hooks)
