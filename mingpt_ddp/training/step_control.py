"""What couples a train step to its run: staging, the flags of all ranks, anomalies, norms."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import Context


@dataclass(frozen=True)
class StepFlags:
    """What the ranks exchange in every step, so that they decide alike."""

    interrupted: bool = False  # a rank has received a signal
    saving: bool = False  # a rank is writing a snapshot
    save_is_due: bool = False  # by rank zero's clock
    loss: float = 0.0  # mean of the step over all ranks, if the anomaly policy checks every step


class StepControl:
    """The control of a step on its own: nothing to wait for, no other ranks, no policy."""

    def wait_for_staging(self) -> None:
        """Wait until no snapshot copies the weights any more."""

    def send_flags(self, loss: Tensor) -> Callable[[], StepFlags]:
        """Start an asynchronous all_gather; return a function that waits for all ranks' flags.

        Args:
            loss: this rank's share of the step's mean loss.
        """
        return StepFlags

    def find_anomaly(self, flags: StepFlags, grad_norm: Tensor) -> str | None:
        """Return why the step must not change the weights; None if it may."""
        return None

    def measure_norms(self, step: int) -> AbstractContextManager[None]:
        """Return a context that measures the norms around an update, if they are due."""
        return nullcontext()


class RunControl(StepControl):
    """The control of the steps of a run."""

    def __init__(self, context: Context, saves: SaveSchedule, anomaly: AnomalyPolicy) -> None:
        self.context = context
        self.saves = saves
        self.anomaly = anomaly

    def wait_for_staging(self) -> None:
        self.saves.wait_for_staging()

    def send_flags(self, loss: Tensor) -> Callable[[], StepFlags]:
        own = (
            self.context.interrupt.signal_name is not None,
            self.saves.manager.save_in_progress,
            self.saves.is_due(),
            float(loss) if self.anomaly.checks_every_step else 0.0,  # reading it waits for a GPU
        )
        receive = self.context.runtime.group.all_gather_async(
            torch.tensor(own, dtype=torch.float64)
        )

        def receive_flags() -> StepFlags:
            interrupted, saving, save_is_due, losses = receive().T.tolist()
            return StepFlags(any(interrupted), any(saving), bool(save_is_due[0]), sum(losses))

        return receive_flags

    def find_anomaly(self, flags: StepFlags, grad_norm: Tensor) -> str | None:
        if not self.anomaly.checks_every_step:
            return None
        with self.context.runtime.group.waiting():  # reading waits for a GPU
            norm = float(grad_norm)
        return self.anomaly.find_anomaly(flags.loss, norm)

    def measure_norms(self, step: int) -> AbstractContextManager[None]:
        metrics = self.context.metrics
        return metrics.norms.measure(step, metrics.log_values)
