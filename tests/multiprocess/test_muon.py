"""The ranks of a job divide Muon's work, and come to what one rank alone would."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.optim import muon
from mingpt_ddp.optim.muon import Muon
from multiprocess.ranks import configure, run_ranks


def take_steps(config: dict[str, Any], divides: bool) -> list[Any]:
    """The digest of the parameters after three steps, and how many matrices this rank has orthogonalised."""
    typed = from_mapping(config)
    runtime = Runtime(typed, read_env())
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, rows, bias=False) for rows in (8, 8, 8, 32, 32, 5)])
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    optimizer = Muon(model, typed.optimizer)
    muon.MIN_NUMEL_TO_SHARD = 1
    if divides:
        optimizer.rank, optimizer.world_size = runtime.group.rank, runtime.group.world_size
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
def test_divided_work_is_the_same_work(world_size, tmp_path):
    """Three, two and one matrix of a shape are more and fewer than the ranks."""
    config = configure("model=modern_nano", "optimizer=muon")
    alone = run_ranks(1, take_steps, tmp_path / "alone", config=config, divides=False)
    together = run_ranks(world_size, take_steps, tmp_path / "together", config=config, divides=True)
    assert {digest for digest, _ in together} == {alone[0][0]}
    assert sum(done for _, done in together) == alone[0][1] == 3 * 6
    assert max(done for _, done in together) < alone[0][1]
