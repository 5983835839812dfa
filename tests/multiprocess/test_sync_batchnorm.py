"""Batch normalization over ranks (in examples/digits) gives the results of the whole batch.

They are outputs, gradients and running statistics.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import ROOT
from torch import nn

from mingpt_ddp.config.builders import run_file
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import read_env
from multiprocess.ranks import configure, run_ranks

SHAPE = (12, 3, 4, 5)


def norm_of_the_example() -> nn.BatchNorm2d:
    run_file(ROOT / "examples" / "digits" / "digits.py", "code")
    (module,) = (sys.modules[name] for name in sys.modules if name.startswith("_own_digits_"))
    return module.BatchNorm(3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return 3 * torch.randn(SHAPE, generator=generator) + 1, torch.randn(SHAPE, generator=generator)


def train(norm: nn.Module, part: slice, reduce: bool) -> dict[str, Any]:
    """Take two passes over this part of the batches. Return the results."""
    found: dict[str, Any] = {}
    for step in range(2):
        x, weights = (tensor[part].clone() for tensor in batch(step))
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
    share = SHAPE[0] // ranks
    norm = runtime.strategy.prepare(norm_of_the_example())
    found = train(norm, slice(rank * share, (rank + 1) * share), reduce=ranks > 1)
    norm.eval()
    found["evaluated"] = norm(batch(5)[0]).detach().tolist()
    runtime.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_normalizing_over_ranks_equals_normalizing_the_whole_batch(world_size, tmp_path):
    values = configure("ddp.backend=gloo", "ddp.sync_batchnorm=true")
    ranks = run_ranks(world_size, worker, tmp_path, values=values)
    whole = nn.BatchNorm2d(3)
    expected = train(whole, slice(None), reduce=False)
    whole.eval()
    expected["evaluated"] = whole(batch(5)[0]).detach().tolist()
    for key, value in expected.items():
        parts = [rank[key] for rank in ranks]
        found = [*itertools.chain(*parts)] if key[0] in "xy" else parts[0]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(value), rtol=1e-4, atol=1e-4, msg=key
        )
        assert key[0] in "xy" or all(part == parts[0] for part in parts), "ranks differ"


def test_without_the_key_the_layer_is_torch_s_with_the_same_names():
    norm, torchs = norm_of_the_example(), nn.BatchNorm2d(3)
    assert norm.state_dict().keys() == torchs.state_dict().keys()
    assert torch.equal(norm(batch(0)[0]), torchs(batch(0)[0]))
