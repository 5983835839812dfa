"""Which parameters form a layer, and its norms around an update."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt_ddp.metrics.norms import LayerNorms, layer_of


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("blocks.0.up.weight", "blocks.0"),
        ("head.weight", "head"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_layers(parameter, layer):
    assert layer_of(parameter) == layer


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[3.0], [4.0]])
    model[0].weight.grad = torch.tensor([[0.6], [0.8]])
    model[1].weight.data = torch.tensor([[1.0, 0.0]])
    return model


def measure(model: nn.Module, step: int, world_size: int = 1) -> dict[str, float]:
    """Update by -0.5 gradients; on several ranks that hold the same."""
    found: dict[str, float] = {}
    group = SimpleNamespace(
        world_size=world_size, all_reduce=lambda values: values * world_size, waiting=nullcontext
    )
    with LayerNorms(group, model, every=2).measure(step, lambda step, values: found.update(values)):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_norms_around_an_update(model, world_size):
    expected = {"weights/0": 5.0, "gradients/0": 1.0, "update/0": 0.5}
    expected |= {"weights/1": 1.0, "gradients/1": 0.0, "update/1": 0.0}  # has no gradient
    assert measure(model, 4, world_size) == pytest.approx(
        {f"norms/{k}": v for k, v in expected.items()}
    )


class Reads(TorchDispatchMode):
    """Count the numbers that the host reads, each of which would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_host_reads_no_number_by_itself(model):
    """All come in one copy, however many parameters there are."""
    with Reads() as reads:
        assert measure(model, 4)
    assert reads.count == 0


def test_empty_parameters_have_no_norm(model):
    """As a rank has without rows of a parameter."""
    model.append(nn.Linear(1, 1, bias=False))
    model[2].weight = nn.Parameter(torch.empty(0, 1))
    found = measure(model, 4)
    assert [found[f"norms/{kind}/2"] for kind in ("weights", "gradients", "update")] == [0, 0, 0]


def test_other_steps_are_not_measured(model):
    assert measure(model, 3) == {}
