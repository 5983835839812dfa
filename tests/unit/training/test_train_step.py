"""One training step: clipping equals that of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.data.rng import derive_seed, seed_everything
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.training.train_step import TrainStep


def train_step(model: nn.Module, *overrides: str) -> TrainStep:
    config = from_mapping(configure("model=gpt_nano", *overrides))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = SimpleNamespace(steps_per_epoch=1)
    task = text_task(config)
    return TrainStep(Runtime(config, DistEnv()), task, loader, BatchPlan(1, 1, 1), model, optimizer)


def with_gradients(scale: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)).to(dtype)
    for parameter in model[:2].parameters():  # the last layer has none
        parameter.grad = scale * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("scale", [1e-3, 10.0, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_equals_that_of_torch(scale, limit):
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = train_step(
        ours, f"trainer.grad_norm_clip={'null' if limit is None else limit}"
    ).clip_grad_norm()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
    assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None
        elif limit is not None or scale < float("inf"):
            # without a limit torch multiplies by inf / inf
            assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())


@pytest.mark.parametrize("limit", ["1.0", "null"])
def test_a_model_without_gradients(limit):
    model = nn.Linear(1, 1)
    assert train_step(model, f"trainer.grad_norm_clip={limit}").clip_grad_norm() == 0


def test_weight_decay_follows_its_schedule_after_a_rollback():
    """Which loads the optimizer's state: torch replaces the parameter groups."""
    model = nn.Linear(1, 1)
    decays = [
        "optimizer.weight_decay_schedule=linear",
        "optimizer.warmup_steps=0",
        "trainer.max_epochs=null",
    ]
    step = train_step(model, *decays, "trainer.max_steps=10")
    step.optimizer.param_groups[0]["weight_decay"] = 1.0
    step = TrainStep(step.runtime, step.task, step.loader, step.plan, model, step.optimizer)
    step.optimizer_step(1)
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    step.optimizer_step(5)
    assert step.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_the_seed_equals_that_of_torch():
    seed_everything("dropout", 1, 2, 3)
    ours = torch.get_rng_state()
    torch.manual_seed(derive_seed("dropout", 1, 2, 3))
    assert torch.equal(ours, torch.get_rng_state())
