"""The jobs of the process with the fake GPU; their results are plain values."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from example_model import with_example
from torch import nn

from fake_gpu.cases import VOCABULARY, Case
from fake_gpu.memory import MemoryTracker
from fake_gpu.mutants import MUTANTS, mutated
from fake_gpu.observe import Observer
from fake_gpu.rank import config_of, fake_rank
from fake_gpu.work import build_run, decode, evaluate, log, stage, train

PHASES = {"steps": train, "log": log, "stage": stage, "evaluate": evaluate, "sample": decode}


def peak_bytes(overrides: list[str], world_size: int, vocab_size: int) -> int:
    """Return the peak of rank zero's memory in a training step, in bytes."""
    config = config_of(overrides)
    with fake_rank(config, world_size) as runtime, MemoryTracker().watching() as memory:
        run = build_run(config, runtime, vocab_size)
        run.train(1)  # allocates the state of the optimizer
        memory.peak = memory.bytes
        run.train(2)
        return memory.peak


def run_case(
    overrides: list[str], world_size: int, rank: int, phases: tuple[str, ...] = tuple(PHASES)
) -> dict[str, Any]:
    """Let a rank take two steps, log, stage a snapshot, evaluate and sample, or some of that.

    Return the waits of the host and the collectives by phase, and the shapes of the parameters.
    """
    config = config_of(overrides)
    with fake_rank(config, world_size, rank) as runtime, Observer() as observer:
        run = build_run(config, runtime, VOCABULARY)
        for phase in phases:
            with observer.during(phase):
                PHASES[phase](run)
        whole = run.task.build_model().named_parameters()
        return {
            "waits": observer.waits,
            "collectives": observer.collectives,
            "shapes": {name: list(parameter.shape) for name, parameter in whole},
        }


def several_gpus(overrides: list[str], ranks: int, rank: int) -> dict[str, Any]:
    """Run examples/model_parallel.py, in all phases, on a node with `ranks` ranks.

    Return the collectives by phase; the GPU and the size of each parameter; and the GPUs with a
    stream that copies a snapshot.
    """
    config = with_example(config_of(overrides))
    local = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks))
    with local, fake_rank(config, ranks, rank) as runtime, Observer() as observer:
        run = build_run(config, runtime, VOCABULARY)
        for phase, work in PHASES.items():
            with observer.during(phase):
                work(run)
        parameters = dict(run.trainable.model.named_parameters())
        return {
            "waits": observer.waits,
            "collectives": observer.collectives,
            "gpus": {name: parameter.device.index for name, parameter in parameters.items()},
            "sizes": {name: parameter.numel() for name, parameter in parameters.items()},
        }


def run_mutant(name: str) -> dict[str, Any]:
    """Return the result of a phase of a mutant's case, with its code."""
    mutant = MUTANTS[name]
    case = mutant.case
    with mutated(mutant):
        return run_case(case.overrides(), case.ranks, case.rank, (mutant.phase,))


def synchronized_batchnorm() -> None:
    """Take the forward pass of a batch normalization over all ranks."""
    case = Case(strategy="ddp", ranks=8)
    config = config_of([*case.overrides(), "ddp.sync_batchnorm=true"])
    with fake_rank(config, case.ranks) as runtime:
        norm = runtime.strategy.prepare(nn.Sequential(nn.BatchNorm2d(3)))
        norm(torch.ones(2, 3, 4, 4, device=runtime.device))
