"""Batch normalization over ranks equals that of the whole batch: outputs, gradients, running
statistics.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.sync_batchnorm import synchronize
from multiprocess.ranks import configure, run_ranks

CPU = torch.device("cpu")
NORMS = {
    "1d": (nn.BatchNorm1d(3), (12, 3)),
    "2d": (nn.BatchNorm2d(3), (12, 3, 4, 5)),
    "3d": (nn.BatchNorm3d(3, momentum=None), (12, 3, 2, 2, 2)),
    "no gain": (nn.BatchNorm2d(3, affine=False), (12, 3, 4, 5)),
    "no statistics": (nn.BatchNorm2d(3, track_running_stats=False), (12, 3, 4, 5)),
}


def batch(shape: tuple[int, ...], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return 3 * torch.randn(shape, generator=generator) + 1, torch.randn(shape, generator=generator)


def train(norm: nn.Module, shape: tuple[int, ...], part: slice, reduce: bool) -> dict[str, Any]:
    """Take two passes over this part of the batches; return what they give."""
    found: dict[str, Any] = {}
    for step in range(2):
        x, weights = (tensor[part].clone() for tensor in batch(shape, step))
        x.requires_grad_()
        y = norm(x)
        (y * weights).sum().backward()
        found[f"y{step}"], found[f"x{step}"] = y.detach().tolist(), x.grad.tolist()
    for name, parameter in norm.named_parameters():
        if reduce:
            dist.all_reduce(parameter.grad)
        found[name] = parameter.grad.tolist()
    return found | {name: buffer.tolist() for name, buffer in norm.named_buffers()}


def worker(values: dict[str, Any]) -> dict[str, Any]:
    runtime = Runtime(from_mapping(values), read_env())
    rank, ranks = runtime.group.rank, runtime.group.world_size
    found = {}
    for name, (norm, shape) in NORMS.items():
        share = shape[0] // ranks
        synchronized = synchronize(copy.deepcopy(norm), CPU)
        found[name] = train(
            synchronized, shape, slice(rank * share, (rank + 1) * share), reduce=True
        )
        synchronized.eval()
        found[name]["evaluated"] = synchronized(batch(shape, 5)[0]).detach().tolist()
    runtime.close()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    return run_ranks(request.param, worker, directory, values=configure("ddp.backend=gloo"))


@pytest.mark.parametrize("name", NORMS)
def test_it_equals_that_of_the_whole_batch(name, ranks):
    norm, shape = NORMS[name]
    whole = copy.deepcopy(norm)
    expected = train(whole, shape, slice(None), reduce=False)
    whole.eval()
    expected["evaluated"] = whole(batch(shape, 5)[0]).detach().tolist()
    for key, value in expected.items():
        parts = [rank[name][key] for rank in ranks]
        found = [*itertools.chain(*parts)] if key[0] in "xy" else parts[0]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(value), rtol=1e-4, atol=1e-4, msg=key
        )
        assert key[0] in "xy" or all(part == parts[0] for part in parts), "ranks differ"


def test_one_rank_computes_alike():
    norm, shape = NORMS["2d"]
    alone, torchs = (
        train(synchronize(copy.deepcopy(norm), CPU), shape, slice(None), False),
        copy.deepcopy(norm),
    )
    expected = train(torchs, shape, slice(None), reduce=False)
    for key, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(alone[key]), torch.tensor(value), rtol=1e-4, atol=1e-4
        )


def test_names_and_tensors_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    synchronized = synchronize(model, CPU)
    assert {
        name: id(tensor) for name, tensor in synchronized.state_dict(keep_vars=True).items()
    } == before
