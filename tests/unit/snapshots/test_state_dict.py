"""An optimizer state in a snapshot is refused in one line if it does not fit the optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mingpt_ddp.config.keys.optimizer_config import AdamWConfig, MuonConfig, SGDConfig
from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.optim import build_optimizer, declare_state
from mingpt_ddp.optim.state import declared_state
from mingpt_ddp.snapshots.hashes import sha256_of_tensors
from mingpt_ddp.snapshots.state_dict import check_savable, load_optimizer_state, optimizer_state


def test_sha256_is_of_names_shapes_types_and_bytes():
    """Runs record this hash, so it must not change between versions."""
    content = b"a (2, 1) torch.int16" + b"\x01\x00\x02\x00" + b"b () torch.bool" + b"\x01"
    column = torch.tensor([[1, 0], [2, 0]], dtype=torch.int16)[:, :1]
    tensors = {"b": torch.tensor(True), "a": torch.nn.Parameter(column, requires_grad=False)}
    assert sha256_of_tensors(tensors) == hashlib.sha256(content).hexdigest()


class Rows(torch.optim.Optimizer):
    """An optimizer whose state is a number and a tensor of unusual shape and type."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("mean", torch.ones(len(parameter), dtype=torch.bfloat16))
            state["count"] = state.get("count", 0) + 1


@declare_state(Rows)
def rows_state(parameter, group):
    return {"mean": torch.zeros(len(parameter), dtype=torch.bfloat16), "count": 0}


class Undeclared(Rows):
    pass


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: build_optimizer(model, AdamWConfig(name="adamw")),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "sgd": lambda model: build_optimizer(model, SGDConfig(name="sgd")),
    "plain sgd": lambda model: build_optimizer(
        model, SGDConfig(name="sgd", momentum=0.0, nesterov=False)
    ),
    "muon": lambda model: build_optimizer(model, MuonConfig(name="muon")),
    "own": lambda model: Rows(model.parameters()),
}


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    optimizer = OPTIMIZERS[name](model)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, optimizer = trained(name)
    return model, {key: each.clone() for key, each in optimizer_state(model, optimizer).items()}


def types(state):
    return {
        key: (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
        for key, value in state.items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_declared_state_is_the_one_after_a_step(name):
    _, optimizer = trained(name)
    declared = declared_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert types(declared[parameter]) == types(optimizer.state[parameter])


def lost(tensors, key):
    del tensors[key]


def lost_everywhere(tensors, key):
    for name in [name for name in tensors if name.endswith(key.partition(":")[2])]:
        del tensors[name]


def added(tensors, key):
    tensors[f"{key}_more"] = tensors[key]


def one_number(tensors, key):
    tensors[key] = tensors[key].sum()


def shorter(tensors, key):
    tensors[key] = tensors[key][:1].clone()


def another_type(tensors, key):
    tensors[key] = tensors[key].half()


def number_instead(tensors, key):
    tensors[f"{key}:float"] = torch.tensor(1.0, dtype=torch.float64)


DAMAGES = (lost, lost_everywhere, added, one_number, shorter, another_type, number_instead)
KEYS = [
    ("adamw", "exp_avg_sq"),
    ("sgd", "momentum_buffer"),
    ("muon", "momentum"),
    ("muon", "exp_avg"),
    ("own", "mean"),
]
# Parameters that never had a gradient have no state.
ALLOWED = [("sgd", "momentum_buffer", lost), ("sgd", "momentum_buffer", lost_everywhere)]
CASES = [(*key, damage) for key in KEYS for damage in DAMAGES if (*key, damage) not in ALLOWED]


@pytest.mark.parametrize(("name", "key", "damage"), CASES)
def test_an_invalid_state_is_refused_before_a_kernel_runs(name, key, damage):
    model, tensors = tensors_of(name)
    damage(tensors, next(each for each in tensors if each.endswith(f":{key}")))
    with pytest.raises(
        SnapshotError, match=r"the snapshot's optimizer state of \d\.\w+ (is|has|does)"
    ):
        load_optimizer_state(model, OPTIMIZERS[name](model), tensors)


@pytest.mark.parametrize("damage", [one_number, shorter, added])
def test_an_undeclared_state_is_loaded_unchecked(damage):
    model, tensors = tensors_of("own")
    damage(tensors, "1.weight:mean")
    optimizer = Undeclared(model.parameters())
    load_optimizer_state(model, optimizer, tensors)
    assert optimizer_state(model, optimizer).keys() == tensors.keys()


def test_a_state_of_another_optimizer_is_refused():
    model, tensors = tensors_of("muon")
    with pytest.raises(
        SnapshotError, match="does not have exactly the entries exp_avg, exp_avg_sq, step"
    ):
        load_optimizer_state(model, OPTIMIZERS["adamw"](model), tensors)


def test_momentum_may_be_set_to_zero_later():
    model, tensors = tensors_of("sgd")
    optimizer = OPTIMIZERS["plain sgd"](model)
    load_optimizer_state(model, optimizer, tensors)
    assert optimizer_state(model, optimizer) == {}


def test_a_declaration_of_other_state_is_refused():
    """It is refused at the first start. Otherwise every resume would fail."""
    model, optimizer = trained("own")
    check_savable(model, optimizer)
    optimizer.state[model[1].bias]["mean"] = torch.ones(3)
    message = (
        r"state of 1\.bias has the wrong mean: \[3\] torch.float32 instead of \[3\] torch.bfloat16"
    )
    with pytest.raises(CodeError, match=message):
        check_savable(model, optimizer)
