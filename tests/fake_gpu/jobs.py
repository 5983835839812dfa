"""The jobs that run on the fake GPU. Their results are plain values."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from example_model import with_example

from fake_gpu.memory import MemoryTracker
from fake_gpu.observe import Observer
from fake_gpu.rank import config_of, fake_rank
from fake_gpu.work import build_run, step
from mingpt_ddp.inference.generate import DecodeSession
from mingpt_ddp.models import build_model


def take_step(
    overrides: list[str], world_size: int, vocab_size: int, rank: int = 0
) -> dict[str, Any]:
    """Let a rank take two steps.

    Returns:
        The peak of the memory, the waits of the host and the collectives in the second step.
    """
    config = config_of(overrides)
    tracker = MemoryTracker()
    with (
        fake_rank(config, world_size, rank) as runtime,
        tracker.watching() as memory,
        Observer() as observer,
    ):
        run = build_run(config, runtime, vocab_size)
        step(run, 1)  # the first step allocates the optimizer's state
        memory.peak = memory.bytes
        observer.forget()
        step(run, 2)
        return {
            "peak": memory.peak,
            "waits": observer.waits,
            "collectives": observer.collectives,
        }


def several_gpus(overrides: list[str], ranks: int, rank: int) -> dict[str, Any]:
    """Take two steps of examples/model_parallel.py on a node with `ranks` ranks.

    Returns:
        The waits and collectives of the second step, and the GPU and size of each parameter.
    """
    config = with_example(config_of(overrides))
    local = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks))
    with local, fake_rank(config, ranks, rank) as runtime, Observer() as observer:
        run = build_run(config, runtime, vocab_size=64)
        step(run, 1)
        observer.forget()
        step(run, 2)
        parameters = dict(run.trainable.model.named_parameters())
        return {
            "waits": observer.waits,
            "collectives": observer.collectives,
            "gpus": {name: parameter.device.index for name, parameter in parameters.items()},
            "sizes": {name: parameter.numel() for name, parameter in parameters.items()},
        }


def waits_of_timing(overrides: list[str], vocab_size: int) -> dict[str, int]:
    """Take a step and read its duration. Return the waits of the reading."""
    config = config_of(overrides)
    with fake_rank(config, 1) as runtime, Observer() as observer:
        run = build_run(config, runtime, vocab_size)
        step(run, 1)
        observer.forget()
        run.meter.read()
        return observer.waits


def decodes_with_a_graph(overrides: list[str], vocab_size: int) -> bool:
    """Begin to sample from a model. Return True if its steps are replayed from a CUDA graph."""
    config = config_of(overrides)
    with fake_rank(config, 1) as runtime, torch.no_grad():
        model = build_model(config.model, vocab_size, config.data.block_size).to(runtime.device)
        return DecodeSession(model, batch=1, positions=config.data.block_size).graph is not None


def waits_of_faults() -> dict[str, int]:
    """Make the host wait for the GPU in every way. Return the waits that the observer saw."""
    with fake_rank(config_of([]), 1) as runtime, Observer() as observer:
        x = torch.ones(4, device=runtime.device)
        x.sum().item()
        x.cpu()
        torch.ones(4).to(runtime.device)
        torch.ones(4).to(runtime.device, non_blocking=True)
        x.mul(torch.ones(()))
        torch.cuda.synchronize()
        return observer.waits
