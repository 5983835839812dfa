"""The flags that the ranks exchange in every step, so that they decide alike."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from mingpt_ddp.distributed.group.json_collectives import refuse_differing_names
from mingpt_ddp.distributed.group.process_group import ProcessGroup


class StepFlags(NamedTuple):
    """What a rank sends; and what all ranks receive: of any rank, but where it says otherwise."""

    interrupted: bool = False  # by a signal
    saving: bool = False  # a snapshot is being written
    save_is_due: bool = False  # by rank zero's clock
    loss: float = 0.0  # the sum of all ranks' shares, if the anomaly policy checks every step
    steps: int = 0  # of the run, which rank zero's clock fixes in this step; 0: it does not


def send_flags(
    flags: StepFlags, names: Iterable[str], group: ProcessGroup
) -> Callable[[], StepFlags]:
    """Start an asynchronous all_gather; return a function that waits for all ranks' flags.

    It raises a TrainingError if the ranks have other names.

    Args:
        names: of the losses and metrics of the step.
    """
    names = tuple(sorted(names))
    values = [*flags, _digest(names)]
    receive = group.all_gather_async(torch.tensor(values, dtype=torch.float64))

    def receive_flags() -> StepFlags:
        interrupted, saving, save_is_due, losses, steps, digests = receive().T.tolist()
        if len({*digests}) > 1:
            refuse_differing_names(group.all_gather(list(names)))
        return StepFlags(
            interrupted=any(interrupted),
            saving=any(saving),
            save_is_due=bool(save_is_due[0]),
            loss=sum(losses),
            steps=int(steps[0]),
        )

    return receive_flags


@functools.cache
def _digest(names: tuple[str, ...]) -> int:
    """Return 48 bits, which a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:6], "little")
