"""The state of hooks is packed into named tensors and unpacked again."""

from __future__ import annotations

import math
import re

import pytest
import safetensors.torch
import torch

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.snapshots.hashes import describe_tensors
from mingpt_ddp.snapshots.hook_state import (
    describe_states,
    pack_state,
    refuse_differing_states,
    unpack_states,
)
from mingpt_ddp.snapshots.staging_buffer import encode

CPU = torch.device("cpu")


def test_an_unpacked_state_equals_the_original():
    average = torch.arange(6.0).view(2, 3).T
    state = {
        "a.weight": average,
        "b@0-of-2": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.ones(0),
        "flag": torch.tensor(True),
    }
    plain = {"big": 10**30, "x": 0.1, "inf": math.inf, "yes": True, "text": "\ud800", "none": None}
    other = {"step": 3}
    tensors = pack_state("gradients Average", state | plain) | pack_state("update Average", other)
    found = unpack_states(safetensors.torch.load(bytes(encode(tensors))), CPU)
    assert sorted(found) == ["gradients Average", "update Average"]
    assert found["update Average"] == other
    returned = found["gradients Average"]
    assert [*returned] == [*state, *plain]
    assert {key: returned[key] for key in plain} == plain
    for key, tensor in state.items():
        assert torch.equal(returned[key], tensor) and returned[key].dtype == tensor.dtype


def test_unpacked_tensors_are_copies():
    tensors = pack_state("hook", {"a": torch.ones(2)})
    unpack_states(tensors, CPU)["hook"]["a"].zero_()
    assert unpack_states(tensors, CPU)["hook"]["a"].tolist() == [1.0, 1.0]


def test_the_file_size_does_not_depend_on_the_digits_of_a_number():
    sizes = {len(encode(pack_state("hook", {"step": 10**n}))) for n in range(10)}
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must return a dictionary, not NoneType"),
        ({"a": {1}}, "state_dict()['a'] cannot be saved: it holds set"),
        ({"a": {"b": 1}}, "['a'] cannot be saved: it holds dict; use a flat dictionary of numbers"),
        ({"a": [1]}, "state_dict()['a'] cannot be saved: it holds list; use a flat dictionary"),
        ({1: 2}, "state_dict() cannot be saved: a key has type int"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "it holds torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "['a'] cannot be saved: it holds a sparse, nested or"),
        ({"a": torch.ones(1, device="meta")}, "it holds a sparse, nested or meta tensor"),
        ({"a": torch.nested.nested_tensor([torch.ones(1)])}, "it holds a sparse, nested or meta"),
        ({"a": 10**5000}, "state_dict() cannot be saved as JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_values_that_are_neither_json_nor_tensors_are_refused(state, message):
    with pytest.raises(CodeError) as caught:
        pack_state("hook", state)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a", "[]", "{}", '["hook", "a", "b"]', '["hook", ["a"]]', "[[]]", '["no", "a"]']
)
def test_a_damaged_state_is_refused(name):
    tensors = pack_state("hook", {"a": 1}) | {name: torch.ones(2)}
    with pytest.raises(SnapshotError, match="state of the hooks in the snapshot is invalid"):
        unpack_states(tensors, CPU)


def described(state):
    tensors = pack_state("update Average", state)
    return describe_states(tensors, describe_tensors(tensors))


@pytest.mark.parametrize(
    ("states", "where"),
    [
        ([{"a": torch.ones(1), "n": 1}, {"a": torch.ones(1), "n": 1}], None),
        ([{"a": torch.ones(1)}, {"a": torch.zeros(1)}], "['a'] on rank 1"),
        ([{"n": 1, "m": 2}, {"n": 1, "m": 2}, {"n": 3, "m": 2}], "['n'] on rank 2"),
        ([{"n": 1}, {"n": 2}, {"n": 2}], "['n'] on ranks 1, 2"),
        ([{"n": 1}, {"n": 1, "late": torch.ones(1)}], "['late'] on rank 1"),
        ([{"n": None}, {"n": torch.ones(1)}], "['n'] on rank 1"),
    ],
)
def test_a_state_that_differs_between_ranks_is_refused(states, where):
    by_rank = [described(state) for state in states]
    if where is None:
        refuse_differing_states(8, by_rank)
        return
    expected = f"Average of @acts('update'): state_dict(){where} differs from rank 0 at step 8"
    with pytest.raises(CodeError, match=re.escape(expected)):
        refuse_differing_states(8, by_rank)
