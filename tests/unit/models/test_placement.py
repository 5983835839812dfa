"""A model that places its own layers: who calls it, and what trains it.

tests/fake_gpu/test_steps.py trains one on several GPUs, tests/e2e/test_model_parallel.py on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from example_model import with_example
from multiprocess.ranks import configure
from tasks import text_task
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.strategies.canonical import CanonicalStrategy, CanonicalZero1Strategy
from mingpt_ddp.distributed.strategies.ddp import DDPStrategy
from mingpt_ddp.distributed.strategies.fsdp import FSDPStrategy
from mingpt_ddp.distributed.strategies.single import SingleStrategy
from mingpt_ddp.distributed.strategies.zero1 import Zero1Strategy
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import build_model, move_model
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.optim.muon import Muon
from mingpt_ddp.training.trainable import build_trainable

CPU, META = torch.device("cpu"), torch.device("meta")


class Placed(nn.Module):
    """One layer where the rank is, and one without values."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = nn.Linear(2, 2)

    def to_devices(self, device: torch.device) -> None:
        self.one.to(device)
        self.two.to("meta")


def test_a_model_places_itself_or_is_moved():
    placed = move_model(Placed(), CPU)
    assert [parameter.device for parameter in placed.parameters()] == [CPU, CPU, META, META]
    assert move_model(nn.Linear(2, 2), META).weight.device == META


def test_the_strategy_lets_the_model_place_itself():
    config = with_example(from_mapping(configure()))
    runtime = Runtime(config, DistEnv())
    model = build_trainable(runtime, text_task(config, vocab_size=65)).model
    assert {parameter.device for parameter in model.parameters()} == {CPU}


@pytest.mark.parametrize(
    "cls",
    [
        Zero1Strategy,
        FSDPStrategy,
        CanonicalStrategy,
        CanonicalZero1Strategy,
    ],
)
def test_a_strategy_for_one_device_refuses_it(cls):
    """Without a process group: only the model is looked at."""
    message = "Placed has a method to_devices, .* needs ddp.strategy=ddp and ddp.reduction=fast; "
    with pytest.raises(ConfigError, match=message):
        cls.__new__(cls).check_model(Placed())


@pytest.mark.parametrize("cls", [SingleStrategy, DDPStrategy])
def test_a_strategy_for_several_devices_takes_it(cls):
    strategy = cls.__new__(cls)
    strategy.ddp = from_mapping(configure()).ddp
    strategy.check_model(Placed())


def test_muon_handles_the_matrices_of_each_device(monkeypatch):
    config = from_mapping(configure("model=gpt_nano", "optimizer=muon"))
    model = build_model(config.model, 11, 8)
    model.blocks[2].to("meta")
    optimizer = build_optimizer(model, config.optimizer)
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["muon"]]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    taken = []
    monkeypatch.setattr(Muon, "_muon_step", lambda self, members, *rates: taken.append(members))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure: None)
    optimizer.step()
    assert [{p.device for p in members} for members in taken] == [{CPU}, {META}]
    assert sum(map(len, taken)) == sum(len(group["params"]) for group in optimizer.param_groups)
