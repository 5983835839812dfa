"""The flags that the ranks exchange in every step, so that they decide alike."""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from mingpt_ddp.distributed.process_group import ProcessGroup


@dataclass(frozen=True)
class StepFlags:
    """What a rank sends; and what all ranks receive: of any rank, but where it says otherwise."""

    interrupted: bool = False  # by a signal
    saving: bool = False  # a snapshot is being written
    save_is_due: bool = False  # by rank zero's clock
    loss: float = 0.0  # the sum of all ranks' shares, if the anomaly policy checks every step


def send_flags(flags: StepFlags, group: ProcessGroup) -> Callable[[], StepFlags]:
    """Start an asynchronous all_gather; return a function that waits for all ranks' flags."""
    receive = group.all_gather_async(torch.tensor(astuple(flags), dtype=torch.float64))

    def receive_flags() -> StepFlags:
        interrupted, saving, save_is_due, losses = receive().T.tolist()
        return StepFlags(any(interrupted), any(saving), bool(save_is_due[0]), sum(losses))

    return receive_flags
