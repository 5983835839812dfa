"""One training run. Read me first: its stages, and the objects of the training, in order."""

import contextlib
import logging
from collections.abc import Container

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import CHOSEN
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.launch.channels import Report
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.profiling import snapshot_when_out_of_memory
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.storage.code_identity import start_reading
from mingpt_ddp.storage.run_dir import RunStatus
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.copy_check import CopyCheck
from mingpt_ddp.training.result import record_end
from mingpt_ddp.training.saves.attempts import count_attempt, record_attempt
from mingpt_ddp.training.saves.save_schedule import SaveSchedule
from mingpt_ddp.training.start.stages import (
    Inputs,
    Listeners,
    RunRecord,
    Setup,
    build,
    open_directory,
    open_listeners,
    prepare,
    record_start,
)
from mingpt_ddp.training.train_state import Context
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainer import Outcome, Trainer
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
    code = runtime.group.env.call_on_rank_zero(lambda: start_reading({**CHOSEN}))
    inputs = prepare(config, runtime, typed, hydra_files, times)
    times.done("data")
    with contextlib.ExitStack() as resources:
        record = open_directory(inputs, code, resources)
        times.done("run directory")
        setup = build(inputs, record)
        times.done("model and snapshot")
        record_start(inputs, record, setup, hydra_files)
        listeners = open_listeners(inputs, setup)
        if setup.is_complete:
            outcome = evaluate_complete(setup)
        else:
            signals = interrupt or SignalHandler()
            trainer = begin_attempt(inputs, record, setup, listeners, signals, report)
            with snapshot_when_out_of_memory(inputs.config, runtime):
                outcome = trainer.train()
        record_end(inputs, record, setup, listeners, outcome)
    if outcome.status is RunStatus.PREEMPTED:
        return None
    return setup.state.val_metrics


def evaluate_complete(setup: Setup) -> Outcome:
    """Evaluate a complete run where that is missing, and log a sample."""
    state = setup.state
    evaluator = setup.evaluator
    evaluator.runtime.group.set_activity(f"evaluating after step {state.step}")
    model = setup.trainable.model
    with setup.trainable.average.applied():
        # saved between two evaluations, under a larger limit
        if state.val_step != state.step or not state.val_metrics:
            state.val_metrics = evaluator.run(model, "val") or {}
            state.val_loss = state.val_metrics["loss"]
        if text := evaluator.sample(model, state.step):
            log.info("a sample:\n%s\n", text)
        test_metrics = evaluator.run(model, "test") or {}
    return Outcome(RunStatus.COMPLETE, test_metrics)


def begin_attempt(
    inputs: Inputs,
    record: RunRecord,
    setup: Setup,
    listeners: Listeners,
    interrupt: SignalHandler,
    report: Report | None,
) -> Trainer:
    """Record that this attempt begins to train; return the loop with all its parts."""
    config = inputs.config
    runtime = inputs.runtime
    task = inputs.task
    loader = inputs.loader
    state = setup.state
    state.world_size = runtime.group.world_size
    first_save_s = count_attempt(state, record.last, inputs.times.began_at, runtime.group.env)
    if record.owner:
        record_attempt(record.owner, state, runtime.group.env)
        record.owner.clear_result()
    kept_size = setup.snapshot.state["micro_batch_size"] if setup.snapshot else None
    plan = plan_batches(config, runtime.group.data_size, kept_size)

    # first: no clock counts how long it takes to wrap the model
    train_step = TrainStep(runtime, task, loader, plan, setup.trainable, setup.length)
    model = setup.trainable.model
    metrics = MetricsProcessor(runtime, task, loader, model, state.step, inputs.times)
    metrics.resume(listeners.outboxes, record.end)
    context = Context(task, runtime, setup.trainable, state, metrics, interrupt, setup.code)
    anomaly = AnomalyPolicy(context)
    copies = CopyCheck(context)
    saves = SaveSchedule(context, setup.manager, anomaly, copies, train_step, first_save_s)
    validation = Validation(context, saves, setup.evaluator, listeners.hooks, report)
    return Trainer(context, train_step, saves, validation, anomaly, listeners.hooks)
