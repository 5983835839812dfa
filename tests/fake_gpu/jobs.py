"""The jobs of the process with the fake GPU; their results are plain values."""

from __future__ import annotations

from typing import Any

from fake_gpu.cases import VOCABULARY
from fake_gpu.memory import MemoryTracker
from fake_gpu.observe import Observer
from fake_gpu.rank import config_of, fake_rank
from fake_gpu.work import build_run, decode, evaluate, log, stage, train

PHASES = {"steps": train, "log": log, "stage": stage, "evaluate": evaluate, "sample": decode}


def peak_bytes(overrides: list[str], world_size: int, vocab_size: int) -> int:
    """Return the peak of rank zero's memory in a training step, in bytes."""
    config = config_of(overrides)
    with fake_rank(config, world_size) as runtime, MemoryTracker().watching() as memory:
        run = build_run(config, runtime, vocab_size)
        run.train_step.run(1)  # allocates the state of the optimizer
        memory.peak = memory.bytes
        run.train_step.run(2)
        return memory.peak


def run_case(overrides: list[str], world_size: int, rank: int) -> dict[str, Any]:
    """Let a rank take two steps, log, stage a snapshot, evaluate and sample.

    Return the waits of the host and the collectives by phase, and the shapes of the parameters.
    """
    config = config_of(overrides)
    with fake_rank(config, world_size, rank) as runtime, Observer() as observer:
        run = build_run(config, runtime, VOCABULARY)
        for phase, work in PHASES.items():
            with observer.during(phase):
                work(run)
        whole = run.task.build_model().named_parameters()
        return {
            "waits": observer.waits,
            "collectives": observer.collectives,
            "shapes": {name: list(parameter.shape) for name, parameter in whole},
        }
