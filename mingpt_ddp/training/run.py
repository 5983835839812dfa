"""Train one run. Read this file first: it calls the stages of a run in order.

It also shows which objects the training loop consists of.
"""

import contextlib
import logging

from mingpt_ddp.config.builders import code_roots
from mingpt_ddp.config.job import Job, RunStatus
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.launch.channels import PrunerCallback
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.profiling import snapshot_when_out_of_memory
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.process.env import process_start_time
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.storage.code_identity import start_reading
from mingpt_ddp.training.after_evaluation import Validation
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from mingpt_ddp.training.hooks.observers import Hooks, Observers
from mingpt_ddp.training.recorder import Recorder
from mingpt_ddp.training.result import record_end, recorded_test
from mingpt_ddp.training.start.stages import (
    History,
    build,
    open_directory,
    open_trackers,
    prepare,
    record_attempt,
    record_start,
)
from mingpt_ddp.training.start.start_log import warn_of_edited_code
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Run
from mingpt_ddp.training.trainer import Trainer, TrainingEnd

log = logging.getLogger(__name__)


def train_run(
    job: Job,
    runtime: Runtime,
    signals: SignalHandler | None = None,
    started_at: float | None = None,
    pruner: PrunerCallback | None = None,
) -> dict[str, float] | None:
    """Train to the limits of a job, from the newest snapshot if there is one.

    Args:
        job: The job to run.
        runtime: The runtime of this rank.
        signals: Handler of the signals that end the run early. None to ignore them.
        started_at: time.monotonic() when this attempt (one start of the run) began. None if it
            began with the process.
        pruner: Called on rank zero after each evaluation; may end the job. None outside a search.

    Returns:
        The metrics of the last evaluation of the validation split by name. None if a signal has
        ended the run early.
    """
    times = StartTimes(started_at or process_start_time())
    times.done("processes", at=runtime.began_at)
    times.done("rendezvous")
    code = runtime.group.env.call_on_rank_zero(lambda: start_reading(code_roots()))
    with contextlib.ExitStack() as resources:
        history = open_directory(job, runtime, resources)
        times.done("run directory")
        inputs = prepare(job, runtime, history, resources)
        times.done("data")
        run = build(inputs, history, code)
        evaluator = Evaluator(run.task, runtime)
        times.done("model and snapshot")
        record_start(run, history, job, code)
        hooks = Hooks(runtime.group)
        observers = Observers(hooks, open_trackers(run), pruner, signals or SignalHandler())
        if run.is_complete:
            outcome = evaluate_complete(run, evaluator)
        else:
            trainer = begin_attempt(run, history, times, evaluator, observers)
            with snapshot_when_out_of_memory(run.directory, runtime.group.rank):
                outcome = trainer.train()
        record_end(run, history.locked_directory, observers, outcome)
    if outcome.status is RunStatus.PREEMPTED:
        return None
    return run.state.val_metrics


def evaluate_complete(run: Run, evaluator: Evaluator) -> TrainingEnd:
    """Log a sample of a complete run, and evaluate it if an evaluation is missing.

    If the user's code has been edited since, the weights belong to a different model. The run is
    then not sampled, and the test metrics are read from result.json instead of measured again.
    """
    state = run.state
    group = run.runtime.group
    group.set_activity(f"evaluating after step {state.step}")
    is_edited = group.run_on_rank_zero(lambda: warn_of_edited_code(run.code))
    model = run.trainable.model
    with run.trainable.average.applied():
        # The snapshot may be from a step without an evaluation, if the user has lowered the limit
        # of the run since.
        if state.val_step != state.step or not state.val_metrics:
            state.val_metrics = evaluator.run(model, "val")
            state.val_loss = state.val_metrics["loss"]
        if is_edited:
            return TrainingEnd(RunStatus.COMPLETE, recorded_test(run.directory))
        if text := evaluator.sample(model, state.step):
            log.info("a sample:\n%s\n", text)
        test_metrics = evaluator.run(model, "test")
    return TrainingEnd(RunStatus.COMPLETE, test_metrics)


def begin_attempt(
    run: Run, history: History, times: StartTimes, evaluator: Evaluator, observers: Observers
) -> Trainer:
    """Record that this attempt begins to train. Return the training loop with all its parts."""
    runtime = run.runtime
    record_attempt(run, history, times)
    plan = plan_batches(run.config, runtime.group.data_size, run.resumed.get("micro_batch_size"))

    # Wrap the model before the clocks of the recorder start, so that the time for wrapping does not
    # count as training time.
    train_step = TrainStep(runtime, run.task, run.loader, plan, run.trainable, run.length)
    recorder = Recorder(run, train_step, times, observers, history.end)
    validation = Validation(run, recorder, evaluator, observers)
    return Trainer(run, train_step, recorder, validation, observers)
