"""The training loop. After each step it may log, evaluate, sample and save."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.metrics.profiling import Profiler
from mingpt_ddp.training.after_evaluation import Decision, Validation
from mingpt_ddp.training.anomaly import MAX_CONSECUTIVE_SKIPS
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.length import StepTimer
from mingpt_ddp.training.look import requested_look
from mingpt_ddp.training.memory import FIRST_STEPS, refuse_out_of_memory
from mingpt_ddp.training.recorder import Recorder
from mingpt_ddp.training.step_flags import StepFlags, send_flags
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingEnd:
    """How the training ended."""

    status: RunStatus
    test_metrics: dict[str, float]  # metrics of the test split; {} if it was not evaluated


class Trainer:
    """The training loop of a run, from its current step to its last step."""

    def __init__(
        self,
        run: Run,
        train_step: TrainStep,
        recorder: Recorder,
        validation: Validation,
        observers: Observers,
    ) -> None:
        self.run = run
        self.runtime = run.runtime
        self.state = run.state
        self.train_step = train_step
        self.recorder = recorder
        self.metrics = recorder.metrics
        self.timer = StepTimer(train_step.length, self.metrics.meter)
        self.saves = recorder.saves
        self.validation = validation
        self.anomaly = recorder.saves.anomaly
        self.observers = observers
        # Measures the step that the command `at` shows, before the step is trained.
        self.rehearse = requested_look(train_step)
        self.lr = 0.0  # learning rate of the most recent step
        self._first_steps = range(self.state.step + 1, self.state.step + 1 + FIRST_STEPS)
        self.profiler = Profiler(
            run.directory,
            run.runtime,
            run.config.trainer.profile,
            range(self.state.step, self.steps),
            self.metrics.meter.paused,
        )

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.train_step.steps

    def train(self) -> TrainingEnd:
        """Train to the end of the run."""
        with self._deferring_signals():
            self._warm_up()
            return self.fit()

    def fit(self) -> TrainingEnd:
        """Train to the last step, or until a signal, the pruner or trainer.patience ends the run.

        The last snapshot is then committed.
        """
        trainer = self.run.config.trainer
        end = self._finish_resumed_step()
        while end is None and self.state.step < self.steps:
            step = self.state.step + 1
            self.profiler.step()
            with self._refuse_out_of_memory(step):
                flags = self._train(step)
            if flags is None:  # rolled back: go on after the step of the restored snapshot
                continue
            if flags.fixed_steps:  # trainer.max_minutes now determines which step is the last
                self.train_step.length.fix(flags.fixed_steps, step)
            self.state.step = step
            self._report_finishing()
            self.metrics.step_done(step, self.train_step.length.known_steps)
            if not flags.saving:  # no rank is writing a snapshot any more
                self.saves.take_result()
            if self._is_due(trainer.log_every):
                self.recorder.record_steps(self.lr)
            decision = Decision(end=RunStatus.PREEMPTED)
            if not flags.interrupted:
                decision = self._evaluate()
            end = decision.end
            is_last = step == self.steps
            if end is None and not is_last and self._is_due(trainer.sample_every):
                self.validation.log_sample()
            self._save(decision, flags.save_is_due)
            self.metrics.commit(self.saves.manager.last_step)
        return self._end(end or RunStatus.COMPLETE)

    @contextmanager
    def _deferring_signals(self) -> Iterator[None]:
        """In this context, handle a signal only at the end of a step."""
        signals = self.observers.signals
        signals.deferred = True
        try:
            yield
        finally:
            self.profiler.close()
            self.metrics.close()
            signals.deferred = False

    def _warm_up(self) -> None:
        """Run the warm-up passes. Their time does not count as training time."""
        with self.metrics.meter.paused(), self._refuse_out_of_memory(self._first_steps.start):
            self.train_step.warm_up()
        self.saves.begin()

    def _refuse_out_of_memory(self, step: int) -> AbstractContextManager[None]:
        """Return a context that refuses a run whose first steps do not fit into memory.

        Later steps get a context that does nothing.
        """
        if step not in self._first_steps:
            return nullcontext()
        size = self.train_step.plan.micro_batch_size
        return refuse_out_of_memory(self.run.config, self.runtime, f"a micro-batch of {size}")

    def _finish_resumed_step(self) -> RunStatus | None:
        """Complete the step that the run resumes from, if a signal came before its evaluation.

        Save the step again if it ends the run or has the lowest loss.
        """
        if self.state.step == 0:
            return None
        decision = self._evaluate()
        is_last = decision.end is not None or self.state.step == self.steps
        has_ended = is_last and decision.end is not RunStatus.PREEMPTED
        if has_ended or decision.improved:
            # If the step has been saved already, this only deletes snapshots that retention does
            # not keep.
            self.saves.save()
        return decision.end

    def _evaluate(self) -> Decision:
        """Evaluate this step if an evaluation is due. Decide whether the run ends at this step.

        A signal, the pruner or trainer.patience may end it.
        """
        is_last = self.state.step == self.steps
        decision = Decision()
        if self._is_due(self.run.config.trainer.eval_every):
            decision = self.validation.evaluate()
        end = decision.end or self.validation.prune(is_last) or self.validation.stop_early(is_last)
        return Decision(decision.improved, end)

    def _train(self, step: int) -> StepFlags | None:
        """Train one step, or skip it. Return the flags of all ranks, or None after a rollback."""
        if step in self.state.skipped_steps:
            log.info("step %d is skipped after the rollback", step)
            receive_flags = self._send_flags(step, {"loss": torch.zeros(())})
            return receive_flags()
        self.rehearse(step)
        losses = self.train_step.passes(step)
        self.saves.wait_for_staging()  # the last snapshot may still copy the weights
        receive_flags = self._send_flags(step, losses)  # the exchange goes on while we clip
        grad_norm = self.train_step.clip()
        flags = receive_flags()
        if anomaly := self.anomaly.find_in_step(flags.loss, grad_norm):
            self.train_step.discard()
            is_skipped = self._handle_anomaly(step, anomaly, flags.loss + float(grad_norm))
            return flags if is_skipped else None
        self.lr = self.train_step.update(step)
        self.anomaly.on_step_accepted(step, flags.loss)
        self.metrics.meter.record(losses, grad_norm, self.train_step.phase.fetch_s)
        return flags

    def _send_flags(self, step: int, losses: dict[str, Tensor]) -> Callable[[], StepFlags]:
        """Send the flags of this rank. Return a function that waits for the flags of all ranks.

        Args:
            step: Number of the step.
            losses: This rank's shares of the step's losses and metrics.
        """
        flags = StepFlags(
            interrupted=self.observers.signals.signal_name is not None,
            saving=self.saves.manager.save_in_progress,
            save_is_due=self.saves.is_due(),
            # Reading the loss waits for the GPU, so read it only if every step is checked.
            loss=float(losses["loss"]) if self.anomaly.checks_every_step else 0.0,
            fixed_steps=self.timer.record_step(step),
        )
        return send_flags(flags, losses, self.runtime.group)

    def _handle_anomaly(self, step: int, anomaly: str, loss_and_norm: float) -> bool:
        """Handle an anomaly as trainer.on_nonfinite says: skip the step, roll back or stop.

        Args:
            step: Number of the step.
            anomaly: Description of the anomaly.
            loss_and_norm: Sum of the loss and the gradient norm. It is finite if both are.

        Returns:
            True if the step is skipped, and False after a rollback.

        Raises:
            TrainingError: The run stops.
        """
        cause = "" if math.isfinite(loss_and_norm) else f" ({self.train_step.diagnose(step)})"
        message = f"step {step} has {anomaly}{cause}"
        self.state.consecutive_skips += 1
        skips = self.state.consecutive_skips
        policy = self.run.config.trainer.on_nonfinite
        if policy == "stop" or skips > MAX_CONSECUTIVE_SKIPS:
            # Record NaN, so that reports show that the run has diverged.
            if not math.isfinite(loss_and_norm):
                self.metrics.log(step, run_values={"train/loss": math.nan})
            self.saves.manager.wait()
            again = "" if policy == "stop" else f", like the {skips - 1} steps before it"
            raise self.anomaly.make_error(f"{message}{again}")
        restored_step = self._restore_latest(skipping=[step]) if policy == "rollback" else None
        if restored_step is None:
            log.warning("%s and is skipped", message)
            return True
        log.warning(
            "%s: rolled back to the snapshot of step %d, to skip step %d",
            message,
            restored_step,
            step,
        )
        return False

    def _restore_latest(self, skipping: Sequence[int] = ()) -> int | None:
        """Restore the newest snapshot. Return its step, or None if there is none.

        All ranks call this together.

        Args:
            skipping: Numbers of the steps to skip from now on.
        """
        restored = self.saves.restore_latest()
        if restored is None:
            return None
        state = self.saves.update_wall_time()
        state.skipped_steps = sorted({*state.skipped_steps, *skipping})
        state.roll_back(restored)
        self.recorder.restore_meter()
        self.timer.restart()
        self.metrics.rollback(state.step)
        return state.step

    def _is_due(self, every: int | None) -> bool:
        step = self.state.step
        return step == self.steps or (every is not None and step % every == 0)

    def _report_finishing(self) -> None:
        """Report in the heartbeat that this rank is finishing the step."""
        self.runtime.group.set_activity(f"finishing step {self.state.step}")

    def _save(self, decision: Decision, is_due: bool) -> None:
        """Save this step if it ends the run, if its loss is the lowest, or if a snapshot is due."""
        self._report_finishing()
        is_last = decision.end is not None or self.state.step == self.steps
        if decision.end is RunStatus.PREEMPTED:
            self.saves.save_on_preemption(self.observers.signals.elapsed())
        elif decision.improved or is_last:
            self.saves.save()
        else:
            self.saves.maybe_save(is_due)

    def _end(self, end: RunStatus) -> TrainingEnd:
        """Commit the last snapshot, evaluate the test split, and complete the logs.

        The sample is generated while the last snapshot is written.
        """
        test_metrics: dict[str, float] | None = {}
        if end is not RunStatus.PREEMPTED:
            if self.state.step == self.steps:
                self.validation.log_sample()
            self.saves.commit()
            self.metrics.commit(self.saves.manager.last_step)
        if end is RunStatus.COMPLETE:
            test_metrics = self.validation.test()
            if test_metrics is None:  # a signal has interrupted the evaluation
                end = RunStatus.PREEMPTED
        if end is not RunStatus.PREEMPTED:
            self.metrics.complete(self.state.step)
        return TrainingEnd(end, test_metrics or {})
