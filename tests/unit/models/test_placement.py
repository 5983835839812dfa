"""A model may place its own layers on devices, if its strategy allows it.

tests/fake_gpu/test_steps.py trains such a model on several GPUs. tests/e2e/test_model_parallel.py
trains one on a CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from torch import nn

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.strategies import build_strategy
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import move_model

CPU, META = torch.device("cpu"), torch.device("meta")


class Placed(nn.Module):
    """A model with one layer on the rank's device and one on the meta device."""

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


@pytest.mark.parametrize(
    ("ranks", "words", "is_refused"),
    [
        (1, "ddp.strategy=single", False),
        (2, "ddp.strategy=ddp", False),
        (2, "ddp.strategy=zero1", True),
        (2, "ddp.reduction=canonical", True),
        (2, "ddp.strategy=zero1 ddp.reduction=canonical", True),
    ],
)
def test_strategies_for_one_device_refuse_it(ranks, words, is_refused):
    config = from_mapping(configure(*words.split()))
    group: Any = SimpleNamespace(world_size=ranks, rank=0, tensor_size=1)
    strategy = build_strategy(config.ddp, config.trainer, CPU, group, compiles=False)
    if not is_refused:
        return strategy.check_model(Placed())
    message = r"Placed can .* \(to_devices\), which needs ddp.strategy=ddp and ddp.reduction=fast; "
    with pytest.raises(ConfigError, match=message):
        strategy.check_model(Placed())
