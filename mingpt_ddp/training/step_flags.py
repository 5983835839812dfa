"""The flags that the ranks exchange in every step, so that all ranks decide alike."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from mingpt_ddp.distributed.group.json_collectives import refuse_differing_names
from mingpt_ddp.distributed.group.process_group import ProcessGroup


class StepFlags(NamedTuple):
    """The flags of a step. Each rank sends its own flags, and all ranks receive the same result."""

    interrupted: bool = False  # received as True if a signal has reached any rank
    saving: bool = False  # received as True if any rank is writing a snapshot
    save_is_due: bool = False  # received from rank zero, whose clock decides
    # Sent as this rank's share, received as the sum of all shares. 0 unless the anomaly policy
    # checks every step.
    loss: float = 0.0
    # Received from rank zero: the number of steps of the run, if its clock fixes it in this step.
    # 0 if not.
    fixed_steps: int = 0


def send_flags(
    flags: StepFlags, names: Iterable[str], group: ProcessGroup
) -> Callable[[], StepFlags]:
    """Start to exchange the flags. Return a function that waits for the flags of all ranks.

    The function raises a TrainingError if the names differ between ranks.

    Args:
        flags: The flags of this rank.
        names: Names of the losses and metrics of the step.
        group: The process group.
    """
    names = tuple(sorted(names))
    values = [*flags, _digest(names)]
    receive = group.all_gather_async(torch.tensor(values, dtype=torch.float64))

    def receive_flags() -> StepFlags:
        interrupted, saving, save_is_due, losses, fixed_steps, digests = receive().T.tolist()
        if len({*digests}) > 1:
            refuse_differing_names(group.all_gather(list(names)))
        return StepFlags(
            interrupted=any(interrupted),
            saving=any(saving),
            save_is_due=bool(save_is_due[0]),
            loss=sum(losses),
            fixed_steps=int(fixed_steps[0]),
        )

    return receive_flags


@functools.cache
def _digest(names: tuple[str, ...]) -> int:
    """Return a hash of the names with 48 bits, which a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:6], "little")
