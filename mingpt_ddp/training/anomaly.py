"""Sick training: when a step must not be taken, and who is to blame."""

from __future__ import annotations

import math

import torch

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import TrainingError
from mingpt_ddp.snapshots.train_state import TrainState

EMA_DECAY = 0.98  # of the average loss, per step
MAX_CONSECUTIVE_SKIPS = 10  # steps left out in a row, after which the cause is no single batch


class AnomalyPolicy:
    """Judges a step by numbers that are the same on all ranks, so that all judge alike."""

    def __init__(self, config: Config, scaled: bool, device: torch.device) -> None:
        """
        Args:
            scaled: a gradient scaler passes over steps whose gradients overflow; that is no make_error.
        """
        self.config, self.trainer, self.scaled = config, config.trainer, scaled
        # On a GPU it costs a moment to look at a loss; without a policy for it that is done when it is logged.
        self.checks_every_step = (
            device.type == "cpu" or self.trainer.on_nonfinite != "stop" or bool(self.trainer.spike_factor)
        )

    def find_anomaly(self, loss: float, grad_norm: float, position: TrainState) -> str | None:
        """What is wrong with this step, before it is taken.

        Args:
            loss: the mean loss of the step over all ranks, nats per character.
            grad_norm: of the gradients, before clipping.
        """
        if not math.isfinite(loss) or not (self.scaled or math.isfinite(grad_norm)):
            return f"loss {loss} and gradient norm {grad_norm}"
        factor, average = self.trainer.spike_factor, position.loss_ema
        if factor is not None and average is not None and loss > factor * average:
            return f"loss {loss:.4f}, more than {factor:g} times the average of {average:.4f}"
        return None

    def on_step_accepted(self, step: int, loss: float, position: TrainState) -> None:
        """This step is taken."""
        if step > max(position.skipped_steps, default=0):  # those before it have only been repeated
            position.consecutive_skips = 0
        if self.trainer.spike_factor is not None:
            average = loss if position.loss_ema is None else position.loss_ema
            position.loss_ema = EMA_DECAY * average + (1 - EMA_DECAY) * loss

    @staticmethod
    def too_many_skips(position: TrainState) -> bool:
        """Whether leaving out steps has not helped. `position` counts this one already."""
        return position.consecutive_skips > MAX_CONSECUTIVE_SKIPS

    def check(self, step: int, loss: float, grad_norm: float, position: TrainState) -> None:
        """Where nobody looks at every step: every rank sees the same numbers, so all of them stop.

        Raises:
            TrainingError: they are not finite.
        """
        if not self.checks_every_step and self.find_anomaly(loss, grad_norm, position):
            raise self.make_error(f"step {step} or one shortly before it has loss {loss} and gradient norm {grad_norm}")

    def make_error(self, told: str) -> TrainingError:
        name = "" if self.config.run.name else f" and run.name={self.config.run_name()}"  # that depends on lr
        return TrainingError(
            f"{told}; run again with a lower optimizer.lr or trainer.grad_norm_clip{name} to continue from the last "
            "snapshot"
        )
