"""Record a run for a training loop of your own, in the same way as main.py does for its loop."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ParamSpec

from torch import Tensor

from mingpt_ddp.config.builders import code_roots
from mingpt_ddp.config.job import Job, RunStatus
from mingpt_ddp.config.loaded_code import script_path
from mingpt_ddp.config.own_loop import refuse_unread_words
from mingpt_ddp.config.validation import check
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import process_start_time
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.storage.code_identity import start_reading
from mingpt_ddp.training.hooks.observers import Hooks, Observers
from mingpt_ddp.training.recorder import Recorder
from mingpt_ddp.training.result import log_end, record_end, recorded_test
from mingpt_ddp.training.saves.resume import check_state
from mingpt_ddp.training.start.stages import (
    open_directory,
    open_trackers,
    record_attempt,
    record_start,
    resume,
)
from mingpt_ddp.training.start.start_log import warn_of_edited_code
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainer import TrainingEnd

P = ParamSpec("P")
log = logging.getLogger(__name__)


def _unless_complete(record: Callable[P, None]) -> Callable[P, None]:
    """Make a method of `RunLog` do nothing if the run was complete when it was opened."""

    @functools.wraps(record)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        run_log = args[0]
        assert isinstance(run_log, RunLog)
        if not run_log.is_complete:
            record(*args, **kwargs)

    return wrapper


class RunLog:
    """Resume a run and keep its records, in a `with` block around a loop of your own.

    The block locks the run directory. If it ends without an error, the last step is saved, and
    result.json says that the run is complete, and whether the loop stopped early. If you start the
    same script again after that, it trains and records nothing more. All ranks must make the same
    calls.
    """

    def __init__(self, step: TrainStep) -> None:
        """Lock the run directory, load the newest snapshot, write config.yaml, and warm up.

        Args:
            step: The train step of your loop.

        Raises:
            RunError: Another process trains this run, or the directory cannot be written.
            SnapshotError: There are snapshots, but none that this run can resume from.
            ConfigError: run.resume is "never", which only main.py supports; or a different training
                loop has trained the run; or the script has ignored a setting on its command line.
        """
        refuse_unread_words(step.task.config)
        check(
            step.task.config.run.resume != "never",
            "run.resume=never is for main.py; choose another run.name for a new run",
        )
        with contextlib.ExitStack() as resources:
            self._open(step, resources)
            self._resources = resources.pop_all()

    def _open(self, step: TrainStep, resources: contextlib.ExitStack) -> None:
        runtime = step.runtime
        task = step.task
        env = runtime.group.env
        times = StartTimes(process_start_time())
        script = script_path() or Path("an interactive session")
        roots = [*code_roots(), script]
        code = env.call_on_rank_zero(lambda: start_reading(roots))
        job = Job(task.config)
        history = open_directory(job, runtime, resources, script)
        snapshots = SnapshotManager(task.config, runtime, history.store, history.directory)
        snapshot = snapshots.load_latest(partial(check_state, task=task))
        logs.to_file(history.directory, env)
        runtime.resume_precision(task.config, snapshot and snapshot.state)
        run = resume(runtime, task, step.loader, step.trainable, history, snapshots, snapshot, code)
        step.length = run.length  # its state has been restored from the snapshot
        record_start(run, history, job, code)
        self._run = run
        self._step = step
        self._locked_directory = history.locked_directory
        self._observers = Observers(Hooks(runtime.group), open_trackers(run), None, SignalHandler())
        self._lr = 0.0
        self._begun_save: int | None = None  # step of the save that began last
        self._is_evaluating = False
        self._has_improved = False  # True until the step with the lowest loss so far is saved
        if run.is_complete:
            env.call_on_rank_zero(lambda: warn_of_edited_code(run.code))
            return
        record_attempt(run, history, times)
        self._recorder = Recorder(run, step, times, self._observers, history.end)
        self._metrics = self._recorder.metrics
        self._saves = self._recorder.saves
        self._saves.anomaly.checks_every_step = False
        resources.callback(self._metrics.close)
        with self._metrics.meter.paused():
            step.warm_up()
        self._saves.begin()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._resources:
            if kind is not None:
                return
            if not self.is_complete:
                self._end()
            elif self._locked_directory:
                end = TrainingEnd(RunStatus.COMPLETE, recorded_test(self.directory))
                log_end(self._run, end, self.directory)

    @property
    def state(self) -> TrainState:
        """The last step of the run, its losses, and the metrics of its last evaluation."""
        return self._run.state

    @property
    def is_complete(self) -> bool:
        """True if the run was complete when this object was made."""
        return self._run.is_complete

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._run.directory

    @_unless_complete
    def wait_for_staging(self) -> None:
        """Wait until the latest snapshot has copied the weights. After that they may change."""
        self._saves.wait_for_staging()

    @_unless_complete
    def record_step(
        self, step: int, losses: Mapping[str, Tensor], grad_norm: Tensor, lr: float
    ) -> None:
        """Record a step after its update.

        Args:
            step: Number of the step. The first step is 1.
            losses: This rank's shares of the losses and metrics, as `TrainStep.passes` returns
                them.
            grad_norm: Norm of the gradients before clipping.
            lr: Learning rate of the update.
        """
        self.state.step = step
        self._lr = lr
        self._metrics.meter.record({**losses}, grad_norm, self._step.phase.fetch_s)
        self._metrics.step_done(step, self._step.steps)

    @_unless_complete
    def log_steps(self) -> None:
        """Log the mean loss and the speed of the steps since the last call.

        Raises:
            TrainingError: The loss or the gradient norm is not finite.
        """
        self._recorder.record_steps(self._lr)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Open a context to evaluate the model in.

        In this context the model has its averaged weights, if trainer.ema is set. The time in the
        context does not count as training time.
        """
        if self.is_complete:
            with self._step.average.applied():
                yield
            return
        self._is_evaluating = True
        try:
            with self._metrics.meter.paused(), self._recorder.averaged_weights():
                yield
        finally:
            self._is_evaluating = False
        self._save_best()

    @_unless_complete
    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log and record the metrics of the validation split, as `Evaluator.run` returns them.

        If its loss is the lowest so far, save this step, unless snapshot.keep_best is false. Within
        `evaluating` the save begins when the model has its own weights again.

        Raises:
            TrainingError: The loss is not finite.
            ConfigError: `sweep.metric` is not among the metrics.
        """
        improved = self._recorder.record_evaluation(metrics)
        self._has_improved = improved and self._run.config.snapshot.keep_best
        self._save_best()

    def _save_best(self) -> None:
        if self._has_improved and not self._is_evaluating:
            self._has_improved = False
            self.save()

    @_unless_complete
    def log_sample(self, text: str | None) -> None:
        """Log a generated text. Ranks that did not generate it pass None."""
        self._metrics.log_sample(self.state.step, text)

    @_unless_complete
    def save(self) -> None:
        """Start to save this step, after the save in progress. Training continues meanwhile."""
        if self._begun_save != self.state.step:
            self._begun_save = self.state.step
            self._saves.save()
        self._metrics.commit(self._run.snapshots.last_step)

    def _end(self) -> None:
        """Wait until the last step is saved, and write result.json."""
        step, steps = self.state.step, self._step.steps
        if step < steps:
            log.info("stopped early: the loop has ended at step %d of %d", step, steps)
        self._saves.commit()
        self._metrics.commit(self.state.step)
        self._metrics.complete(self.state.step)
        record_end(
            self._run, self._locked_directory, self._observers, TrainingEnd(RunStatus.COMPLETE, {})
        )
