"""Record the measurements of a run in its train state and its logs, and pass them to hooks."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mingpt_ddp.config.validation import check, hint_at
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.metrics.jsonl import HistoryEnd, own_metrics
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.metrics.start_times import StartTimes
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.hooks.observers import Observers
from mingpt_ddp.training.saves.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import record_evaluation
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Run


def _check_metric(metric: str | None, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has measured `sweep.metric`, if this is a validation metric.

    Args:
        metric: Value of `sweep.metric`. It may begin with a minus. None if it is not set.
        metrics: The metrics that the evaluation has measured.

    Raises:
        ConfigError: The metric is missing. The message suggests one that was measured.
    """
    name = (metric or "").removeprefix("-")
    names = [f"val_{each}" for each in metrics]
    check(
        not name.startswith("val_") or name in names,
        f"sweep.metric={metric}: the evaluations do not measure it; {hint_at(name, names)}",
    )


def _check_loss(step: int, loss: float) -> None:
    """Refuse a validation loss that is not finite.

    Raises:
        TrainingError: The loss is infinite or not a number.
    """
    if not math.isfinite(loss):
        raise TrainingError(
            f"the validation loss of step {step} is {loss}; start again with a lower optimizer.lr"
        )


class Recorder:
    """Records steps and evaluations, for the trainer and for a training loop of the user's own."""

    def __init__(
        self,
        run: Run,
        train_step: TrainStep,
        times: StartTimes,
        observers: Observers,
        end: HistoryEnd | None,
    ) -> None:
        """Begin to record an attempt (one start of the run).

        Args:
            run: The run to record.
            train_step: The train step of the run.
            times: Durations of the stages of this start.
            observers: The hooks and trackers that receive the measurements.
            end: The end of metrics.jsonl, as earlier attempts left it. None on ranks other than
                zero.
        """
        self.run = run
        self.train_step = train_step
        self.hooks = observers.hooks
        self.metrics = MetricsProcessor(
            run.runtime,
            run.task,
            run.loader,
            run.trainable.model,
            run.state.step,
            times,
            run.directory,
        )
        self.metrics.resume(observers.senders, end)
        self.saves = SaveSchedule(run, train_step, self.metrics.meter, AnomalyPolicy(run))
        self.restore_meter()

    def restore_meter(self) -> None:
        """Load the sums of the current log interval from the train state into the meter."""
        state = self.run.state
        sums = {"loss": state.loss_sum, **state.loss_part_sums}
        self.metrics.meter.load_state(sums, state.loss_steps)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """In this context, the model has its averaged weights, if trainer.ema is set."""
        average = self.run.trainable.average
        if average.decay is not None:
            # The save in progress would otherwise copy the averages in place of the weights.
            self.saves.wait_for_staging()
        with average.applied():
            yield

    def record_steps(self, lr: float) -> None:
        """Log the steps since the last call. A collective.

        Args:
            lr: Learning rate of the last step.

        Raises:
            TrainingError: The loss or the gradient norm is not finite. Raised here only if the
                anomaly policy does not check every step.
        """
        state = self.saves.update_wall_time()
        metrics = self.metrics.log_train(
            state.step,
            self.train_step.length.known_steps,
            self.train_step.parallel_model,
            lr,
            state.goodput,
        )
        if metrics:
            state.train_loss = metrics["train/loss"]
            state.train_metrics = own_metrics(metrics)
            self.saves.anomaly.check(state.step, state.train_loss, metrics["train/grad_norm"])
            self.hooks.call("step", state.step, metrics)

    def record_evaluation(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation of the validation split. Return True if its loss is the lowest.

        Raises:
            TrainingError: The loss is not finite.
            ConfigError: `sweep.metric` is not among the metrics.
        """
        state = self.run.state
        config = self.run.config
        _check_loss(state.step, metrics["loss"])
        _check_metric(config.sweep.metric, metrics)
        improved = record_evaluation(state, metrics, config.trainer.min_delta)
        self.metrics.log_evaluation(state.step, "val", metrics)
        self.hooks.call("evaluate", state.step, metrics)
        return improved
