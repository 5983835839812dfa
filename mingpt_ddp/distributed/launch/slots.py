"""Slots: the cores and GPUs of a machine, divided among concurrent jobs."""

import os
from dataclasses import dataclass

# Environment variable that lists the cores of a worker, such as 0,1.
CORES_VARIABLE = "MINGPT_DDP_CORES"


@dataclass(frozen=True)
class Slot:
    """The cores and GPUs of one of several concurrent jobs."""

    number: int
    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None = None  # as in CUDA_VISIBLE_DEVICES; None for all

    def environ(self) -> dict[str, str]:
        """Return the environment variables that keep the workers of a job in this slot."""
        variables = {CORES_VARIABLE: ",".join(map(str, self.cores))}
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return variables


def divide(n: int, cores: list[int], per_job: int, gpus: list[str] | None) -> list[Slot]:
    """Divide the cores and GPUs of a machine into slots.

    Args:
        n: Number of slots.
        cores: Cores of this machine.
        per_job: Number of cores of a slot. If there are too few cores, slots share them.
        gpus: GPUs of this machine. None if the jobs use no GPU.
    """
    slots = []
    for number in range(n):
        first = number * per_job
        slot_cores = [cores[(first + i) % len(cores)] for i in range(min(per_job, len(cores)))]
        slot_gpus = None
        if gpus is not None:
            size = len(gpus) // n
            slot_gpus = tuple(gpus[number * size : (number + 1) * size])
        slots.append(Slot(number, tuple(sorted(slot_cores)), slot_gpus))
    return slots


def bind_cores() -> None:
    """Keep this process and its children on the cores of its slot, if it has one."""
    cores = os.environ.pop(CORES_VARIABLE, None)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()  # asks the driver without initializing CUDA
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")[:count]
    return [str(index) for index in range(count)]
