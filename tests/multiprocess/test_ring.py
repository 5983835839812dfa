"""The ring all-reduce of examples/ring_hook.py gives the same bits on every rank.

Up to rounding, its sums equal those of torch's all-reduce.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_files import EXAMPLES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp.config.builders import BUILDERS, run_file
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import read_env
from multiprocess.ranks import configure, run_ranks

# Some sizes are below the number of ranks, and most are not divisible by it.
SIZES = (1, 2, 3, 4, 5, 11, 1000, 65_537)


class Scaled(nn.Module):
    """A model whose gradients all equal its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(5))

    def forward(self, scale: float) -> torch.Tensor:
        return scale * (self.first.sum() + self.second.sum())


def average(rank: int, ring_hook: Any) -> list[float]:
    """Let the hook average the gradients of a model with two buckets. Return them."""
    model = DDP(Scaled(), bucket_cap_mb=1e-5)
    model.register_comm_hook(None, ring_hook)
    for _ in range(2):
        model.zero_grad()
        model(float(rank)).backward()
    return torch.cat([p.grad for p in model.parameters()]).tolist()


def reduce_all(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Sum tensors of all sizes, and average gradients.

    Return the bits of the sums, their largest distance from torch's, and the averaged gradients.
    """
    run_file(EXAMPLES / "ring_hook.py", "data.code")
    ring_hook = BUILDERS["comm_hook"]["ring"]
    ring_all_reduce = ring_hook.__globals__["ring_all_reduce"]
    runtime = Runtime(from_mapping(config), read_env())
    bits, distances = [], []
    for size in SIZES:
        generator = torch.Generator().manual_seed(10 * size + runtime.group.rank)
        values = torch.randn(size, generator=generator).to(getattr(torch, dtype))
        expected = values.clone()
        dist.all_reduce(expected)
        ring_all_reduce(values)
        bits.append(values.view(torch.uint8).numpy().tobytes().hex())
        distances.append(float((values - expected).abs().max()))
    gradients = average(runtime.group.rank, ring_hook)
    runtime.close()
    return {"bits": bits, "distance": max(distances), "gradients": gradients}


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, "float32"), (3, "float32"), (3, "bfloat16"), (4, "float32")]
)
def test_every_rank_has_the_same_sum(world_size, dtype, tmp_path):
    results = run_ranks(world_size, reduce_all, tmp_path, config=configure("ddp=gloo"), dtype=dtype)
    assert all(result == results[0] for result in results)
    assert results[0]["distance"] < (1e-5 if dtype == "float32" else 0.1)
    assert results[0]["gradients"] == pytest.approx([(world_size - 1) / 2] * 12)
