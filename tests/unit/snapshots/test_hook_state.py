"""The state of hooks as named tensors, and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import safetensors.torch
import torch

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.snapshots.hook_state import pack_state, unpack_states
from mingpt_ddp.snapshots.staging_buffer import encode

CPU = torch.device("cpu")


def test_a_state_returns_as_it_was():
    average = torch.arange(6.0).view(2, 3).T
    state = {
        "averages": {"a.weight": average, "b@0-of-2": torch.tensor(1.5, dtype=torch.float64)},
        "last": [torch.ones(0), [torch.tensor(True)], None],
        "numbers": [10**30, 0.1, math.inf, True, "text \ud800", {}],
    }
    other = {"step": 3}
    tensors = pack_state("gradients Average", state) | pack_state("update Average", other)
    found = unpack_states(safetensors.torch.load(bytes(encode(tensors))), CPU)
    assert sorted(found) == ["gradients Average", "update Average"]
    assert found["update Average"] == other
    returned = found["gradients Average"]
    assert [*returned] == [*state] and returned["numbers"] == state["numbers"]
    assert torch.equal(returned["averages"].pop("a.weight"), average)
    assert returned["averages"]["b@0-of-2"].dtype == torch.float64
    assert [returned["last"][0].shape, returned["last"][1][0].item()] == [(0,), True]


def test_tensors_are_copied_when_they_return():
    tensors = pack_state("hook", {"a": torch.ones(2)})
    unpack_states(tensors, CPU)["hook"]["a"].zero_()
    assert unpack_states(tensors, CPU)["hook"]["a"].tolist() == [1.0, 1.0]


def test_a_longer_number_needs_no_larger_file():
    sizes = {len(encode(pack_state("hook", {"step": 10**n}))) for n in range(10)}
    assert len(sizes) == 1


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must return a dictionary, not NoneType"),
        ({"a": {"b": {1}}}, "state_dict()['a'] cannot be saved: it holds set"),
        ({"a": {1: 2}}, "state_dict()['a'] cannot be saved: a key is int"),
        ({1: 2}, "state_dict() cannot be saved: a key is int"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "it holds torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "['a'] cannot be saved: it holds a sparse, nested or"),
        ({"a": torch.ones(1, device="meta")}, "it holds a sparse, nested or meta tensor"),
        ({"a": torch.nested.nested_tensor([torch.ones(1)])}, "it holds a sparse, nested or meta"),
        ({"a": 10**5000}, "state_dict() cannot be saved as JSON: Exceeds the limit (4300 digits)"),
        ({"a": ENDLESS}, "state_dict() cannot be saved as JSON: maximum recursion depth"),
    ],
)
def test_what_is_neither_json_nor_a_tensor_is_refused(state, message):
    with pytest.raises(CodeError) as caught:
        pack_state("hook", state)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a", "[]", "{}", '["hook", "a"]', '["hook", 3]', "[[]]", '["no"]']
)
def test_a_damaged_state_is_refused(name):
    tensors = pack_state("hook", {"a": 1}) | {name: torch.ones(2)}
    with pytest.raises(SnapshotError, match="invalid state of hooks"):
        unpack_states(tensors | {'["hook", "a", "b"]': torch.ones(1)}, CPU)
