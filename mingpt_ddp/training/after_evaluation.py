"""Evaluate a run while it trains: record the metrics, and decide whether the run ends."""

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
    """What a run does after an evaluation: save this step as the best one, or end."""

    improved: bool = False  # True if this step should be saved as the best so far
    end: RunStatus | None = None  # status with which the run ends now; None if it goes on


class Validation:
    """The evaluations of a run. They use the averaged weights if trainer.ema is set."""

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
        """Evaluate the model on the validation split. Record and log the metrics.

        Do nothing if the model has been evaluated at this step already.
        """
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
        """Report the evaluation of this step to the pruner of a search. It may end the run.

        Args:
            is_last: True after the last step, when there is nothing left to prune.
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
        """End the run if trainer.patience evaluations in a row have not improved the loss."""
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
        """Evaluate the test split and log its metrics. Return {} if there is no test split.

        Return None if a signal interrupted the evaluation.
        """
        metrics = self._metrics_of("test")
        if metrics:
            self.metrics.log_evaluation(self.state.step, "test", metrics)
        return metrics

    def log_sample(self) -> None:
        """Let the model generate a text, and log it. Do nothing if the task generates no texts."""
        self.run.runtime.group.set_activity(f"sampling after step {self.state.step}")
        with self.metrics.meter.paused(), self.recorder.averaged_weights():
            text = self.evaluator.sample(self.run.trainable.model, self.state.step)
        self.metrics.log_sample(self.state.step, text)

    def _metrics_of(self, split: str) -> dict[str, float] | None:
        """Return the metrics of a split. Return None if a signal interrupted the evaluation."""
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
                    # The hooks may change their state while the save in progress copies it.
                    self.saves.wait_for_staging()
                metrics |= actions.evaluate(self.state.step, model, task, taken=metrics)
        return metrics
