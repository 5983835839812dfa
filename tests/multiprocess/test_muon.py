"""Muon divides its orthogonalization between the ranks, and gets the result of a single rank."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.optim import muon
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.process.env import read_env
from multiprocess.ranks import configure, run_ranks


def take_steps(config: dict[str, Any], sharded: bool) -> list[Any]:
    """Take three steps.

    Return the digest of the parameters and the number of matrices that this rank orthogonalized.
    """
    parsed = from_mapping(config)
    runtime = Runtime(parsed, read_env())
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, rows, bias=False) for rows in (8, 8, 8, 32, 32, 5)])
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    optimizer = Muon(model, parsed.optimizer)
    muon.MIN_NUMEL_TO_SHARD = 1
    if sharded:
        runtime.strategy.configure(optimizer)
    done, whole = [], muon.polar_express
    muon.polar_express = lambda stack: done.append(len(stack)) or whole(stack)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    runtime.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return [hashlib.sha256(weights).hexdigest(), sum(done)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_steps_equal_those_of_a_single_rank(world_size, tmp_path):
    """There are three, two and one matrices of a shape: more and fewer than there are ranks."""
    config = configure("model=modern_nano", "optimizer=muon")
    single = run_ranks(1, take_steps, tmp_path / "alone", config=config, sharded=False)
    several = run_ranks(world_size, take_steps, tmp_path / "together", config=config, sharded=True)
    assert {digest for digest, _ in several} == {single[0][0]}
    assert sum(done for _, done in several) == single[0][1] == 3 * 6
    assert max(done for _, done in several) < single[0][1]
