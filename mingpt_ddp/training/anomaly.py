"""The anomaly policy: find a non-finite loss or gradient norm, or a spike, before the update."""

import math

from torch import Tensor

from mingpt_ddp.config.job import run_name
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.training.trainable import Run

EMA_DECAY = 0.98  # of the loss, per step
MAX_CONSECUTIVE_SKIPS = 10  # beyond that, a bad batch is not the cause


class AnomalyPolicy:
    """Classify each step by its loss and gradient norm.

    Both are equal on all ranks, so every rank decides alike.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer = run.config.trainer
        # Reading the loss synchronizes with the GPU: a policy that only stops reads it when it is
        # logged.
        acts_at_once = self.trainer.on_nonfinite != "stop" or bool(self.trainer.spike_factor)
        self.checks_every_step = acts_at_once or run.runtime.device.type == "cpu"

    def find_in_step(self, loss: float, grad_norm: Tensor) -> str | None:
        """Return what is wrong with a step, before its update; None also if it is checked later."""
        if not self.checks_every_step:
            return None
        with self.run.runtime.group.waiting():  # reading waits for a GPU
            norm = float(grad_norm)
        return self.find_anomaly(loss, norm)

    def find_anomaly(self, loss: float, grad_norm: float) -> str | None:
        """Return what is wrong with a step; None if nothing is.

        Args:
            loss: the mean loss of the step over all ranks.
            grad_norm: of the gradients, before clipping.
        """
        # GradScaler skips an overflowing step itself, which is no anomaly.
        scaled = self.run.runtime.scaler.is_enabled()
        if not math.isfinite(loss) or not (scaled or math.isfinite(grad_norm)):
            return f"loss {loss} and gradient norm {grad_norm}"
        factor = self.trainer.spike_factor
        average = self.run.state.loss_ema
        if factor is not None and average is not None and loss > factor * average:
            return f"loss {loss:.4f}, more than {factor:g} times the average of {average:.4f}"
        return None

    def on_step_accepted(self, step: int, loss: float) -> None:
        """Record a step that updates the weights."""
        state = self.run.state
        # earlier steps are repeated after a rollback
        if step > max(state.skipped_steps, default=0):
            state.consecutive_skips = 0
        if self.trainer.spike_factor is not None:
            average = loss if state.loss_ema is None else state.loss_ema
            state.loss_ema = EMA_DECAY * average + (1 - EMA_DECAY) * loss

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Stop all ranks at a non-finite step, if `find_anomaly` does not check every step.

        Raises:
            TrainingError: the loss or the gradient norm is not finite.
        """
        if not self.checks_every_step and self.find_anomaly(loss, grad_norm):
            raise self.make_error(
                f"step {step} or one shortly before it has loss {loss} and gradient norm "
                f"{grad_norm}"
            )

    def make_error(self, anomaly: str) -> TrainingError:
        config = self.run.config
        # an unnamed run's name depends on lr
        name = "" if config.run.name else f" and run.name={run_name(config)}"
        advice = f"run again with a lower optimizer.lr or trainer.grad_norm_clip{name}"
        return TrainingError(f"{anomaly}; {advice} to continue from the last snapshot")
