"""The anomaly policy: find a loss spike, or a loss or gradient norm that is not finite.

The policy looks at each step before its update, so that the step can be skipped.
"""

import math

from torch import Tensor

from mingpt_ddp.config.job import run_name
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.training.trainable import Run

LOSS_EMA_DECAY = 0.98  # decay per step of the average loss that a spike is compared with
# If more steps in a row are skipped, the cause is not a bad batch, and the run stops.
MAX_CONSECUTIVE_SKIPS = 10


class AnomalyPolicy:
    """Decides whether a step is an anomaly, by its loss and gradient norm.

    Both are equal on all ranks, so every rank decides alike.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer = run.config.trainer
        # Reading the loss waits for the GPU. If an anomaly only stops the run, it is enough to
        # check the losses that are logged.
        acts_at_once = self.trainer.on_nonfinite != "stop" or bool(self.trainer.spike_factor)
        self.checks_every_step = acts_at_once or run.runtime.device.type == "cpu"

    def find_in_step(self, loss: float, grad_norm: Tensor) -> str | None:
        """Describe the anomaly of a step before its update, or return None if there is none.

        Also return None if the policy checks this step later, with `check`.
        """
        if not self.checks_every_step:
            return None
        with self.run.runtime.group.waiting():  # reading the norm waits for the GPU
            norm = float(grad_norm)
        return self.find_anomaly(loss, norm)

    def find_anomaly(self, loss: float, grad_norm: float) -> str | None:
        """Describe the anomaly of a step, or return None if there is none.

        Args:
            loss: Mean loss of the step over all ranks.
            grad_norm: Norm of the gradients before clipping.
        """
        # GradScaler skips steps that overflow. This is normal in fp16, and not an anomaly.
        uses_scaler = self.run.runtime.scaler.is_enabled()
        if not math.isfinite(loss) or not (uses_scaler or math.isfinite(grad_norm)):
            return f"loss {loss} and gradient norm {grad_norm}"
        factor = self.trainer.spike_factor
        average = self.run.state.loss_ema
        if factor is not None and average is not None and loss > factor * average:
            return f"loss {loss:.4f}, more than {factor:g} times the average of {average:.4f}"
        return None

    def on_step_accepted(self, step: int, loss: float) -> None:
        """Record a step that updates the weights."""
        state = self.run.state
        # After a rollback the run repeats the steps before the skipped one. They were accepted once
        # before, so they do not end the series of skips.
        if step > max(state.skipped_steps, default=0):
            state.consecutive_skips = 0
        if self.trainer.spike_factor is not None:
            average = loss if state.loss_ema is None else state.loss_ema
            state.loss_ema = LOSS_EMA_DECAY * average + (1 - LOSS_EMA_DECAY) * loss

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Stop all ranks at an anomaly, if the policy does not check every step already.

        Raises:
            TrainingError: The loss or the gradient norm is not finite.
        """
        if not self.checks_every_step and self.find_anomaly(loss, grad_norm):
            raise self.make_error(
                f"step {step}, or a step shortly before it, has loss {loss} and gradient norm "
                f"{grad_norm}"
            )

    def make_error(self, anomaly: str) -> TrainingError:
        """Make the error that stops the run, with advice on how to continue."""
        config = self.run.config
        # Without run.name, the name of the run is made from its settings, such as the learning
        # rate. A lower rate would then begin a new run instead of continuing this one.
        name = "" if config.run.name else f" and run.name={run_name(config)}"
        advice = f"run again with a lower optimizer.lr or trainer.grad_norm_clip{name}"
        return TrainingError(f"{anomaly}; {advice} to continue from the last snapshot")
