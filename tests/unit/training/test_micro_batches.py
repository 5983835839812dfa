"""Measurements that hooks make of micro-batches are gathered from all ranks and sorted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mingpt_ddp.errors import CodeError
from mingpt_ddp.training.hooks.micro_batches import as_numbers, stack


def test_measurements_of_all_ranks_are_in_the_order_of_the_micro_batches():
    """Micro-batch j ran on rank j mod world size. The last rank has one micro-batch less."""
    by_rank = [[{"a": [0.0, 0.1]}, {"a": [2.0, 0.1]}], [{"a": [1.0, 0.1]}]]
    assert stack(by_rank, "hook")["a"].tolist() == [[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]
    assert stack([[{"a": 0.1}]], "hook")["a"].tolist() == [0.1]


@pytest.mark.parametrize("other", [{}, {"a": [1.0]}, {"a": 1.0, "b": 1.0}, {"b": 1.0}])
def test_other_names_or_shapes_are_refused(other):
    with pytest.raises(CodeError, match="hook: micro_batch must return the same names and shapes"):
        stack([[{"a": 1.0}], [other]], "hook")


def test_numbers_are_exact():
    values = {"half": torch.tensor([0.1], dtype=torch.bfloat16), "nan": math.nan, "large": 2**53}
    numbers = as_numbers(values, "hook")
    assert numbers["half"] == [0.10009765625]
    assert math.isnan(numbers["nan"]) and numbers["large"] == 2**53


@pytest.mark.parametrize("measured", [None, 1.0, [1.0], {"a": "text"}, {"a": [1.0, [2.0]]}])
def test_other_values_are_refused(measured: Any):
    with pytest.raises(CodeError, match="hook: micro_batch must return a dictionary of tensors or"):
        as_numbers(measured, "hook")
