"""What follows an evaluation: its records, and whether it ends the run."""

import logging
from dataclasses import dataclass

from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.training.evaluation.evaluator import Evaluator
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.recorder import Recorder
from mingpt_ddp.training.train_state import has_stopped_early
from mingpt_ddp.training.trainable import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What an evaluation decides."""

    improved: bool = False  # save this step as the best so far
    end: RunStatus | None = None  # what ends the run before its last step


class Validation:
    """Evaluate the averaged weights, if there are some, else those of the model."""

    def __init__(
        self,
        run: Run,
        recorder: Recorder,
        evaluator: Evaluator,
        observers: Observers,
    ) -> None:
        self.run = run
        self.state = run.state
        self.recorder = recorder
        self.metrics = recorder.metrics
        self.saves = recorder.saves
        self.evaluator = evaluator
        self.observers = observers

    def evaluate(self) -> Decision:
        """Evaluate this step, unless that is done; record and log the metrics."""
        state = self.state
        if state.val_step == state.step:
            return Decision()
        with self.metrics.meter.paused():
            metrics = self._metrics_of("val")
        if metrics is None:
            return Decision(end=RunStatus.PREEMPTED)
        improved = self.recorder.record_evaluation(metrics)
        return Decision(improved=improved and self.run.config.snapshot.keep_best)

    def prune(self, is_last: bool) -> RunStatus | None:
        """Report an evaluation of a job of a sweep, whose pruner may end it.

        Args:
            is_last: this is the last step, after which there is nothing to prune.
        """
        state = self.state
        pruner = self.observers.pruner
        if pruner is None or state.best_val_loss is None or state.val_step != state.step:
            return None
        group = self.run.runtime.group
        reason = group.run_on_rank_zero(lambda: pruner(state.step, state.val_metrics))
        if is_last or reason is None:
            return None
        log.info("pruned at step %d: %s", state.step, reason)
        return RunStatus.PRUNED

    def stop_early(self, is_last: bool) -> RunStatus | None:
        """End the run after an evaluation if trainer.patience is at its end."""
        state = self.state
        patience = self.run.config.trainer.patience
        if is_last or not has_stopped_early(state, patience):
            return None
        log.info(
            "stopped early at step %d: trainer.patience=%d evaluations in a row have no loss "
            "below %.4f",
            state.step,
            patience,
            state.patience_loss,
        )
        return RunStatus.COMPLETE

    def test(self) -> dict[str, float] | None:
        """Evaluate the test split, if there is one; return None if a signal interrupted that."""
        metrics = self._metrics_of("test")
        if metrics:
            self.metrics.log_evaluation(self.state.step, "test", metrics)
        return metrics

    def log_sample(self) -> None:
        """Log a text that the model generates, if the task has one."""
        self.run.runtime.group.set_activity(f"sampling after step {self.state.step}")
        with self.metrics.meter.paused(), self.recorder.averaged_weights():
            text = self.evaluator.sample(self.run.trainable.model, self.state.step)
        self.metrics.log_sample(self.state.step, text)

    def _metrics_of(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split; None if a signal interrupted the evaluation."""
        signals = self.observers.signals
        self.run.runtime.group.set_activity(f"evaluating after step {self.state.step}")
        model = self.run.trainable.model
        with self.recorder.averaged_weights():
            metrics = self.evaluator.run_unless_stopped(
                model, split, lambda: signals.signal_name is not None
            )
            if metrics and split == "val":
                task = self.evaluator.task
                actions = self.run.trainable.actions
                if actions.have_state:
                    self.saves.wait_for_staging()  # it would copy what the hooks change
                metrics |= actions.evaluate(self.state.step, model, task, taken=metrics)
        return metrics
