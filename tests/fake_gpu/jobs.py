"""The jobs of the process with the fake GPU; their results are plain values."""

from __future__ import annotations

from fake_gpu.memory import MemoryTracker
from fake_gpu.rank import config_of, fake_rank
from fake_gpu.work import build_run


def peak_bytes(overrides: list[str], world_size: int, vocab_size: int) -> int:
    """Return the peak of rank zero's memory in a training step, in bytes."""
    config = config_of(overrides)
    with fake_rank(config, world_size) as runtime, MemoryTracker().watching() as memory:
        run = build_run(config, runtime, vocab_size)
        run.train_step.run(1)  # allocates the state of the optimizer
        memory.peak = memory.bytes
        run.train_step.run(2)
        return memory.peak
