"""Checksums of tensors, and which rank holds the odd copy."""

from __future__ import annotations

import pytest
import torch

from mingpt_ddp.distributed.group.copies import CHUNK, checksum, checksums, find_difference

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_flipped_bit_changes_the_sum(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    before = int(checksum(tensor))
    content = tensor.flatten().view(torch.uint8)
    for byte in range(len(content)):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert int(checksum(tensor)) != before
            content[byte] ^= 1 << bit
    assert int(checksum(tensor)) == before


def test_the_sum_does_not_depend_on_strides_or_offsets():
    tensor = torch.randn(7, 5)
    buffer = torch.zeros(tensor.numel() + 1)
    copy = buffer[1:].view(7, 5).copy_(tensor)
    assert checksum(copy) == checksum(tensor) == checksum(tensor.T.contiguous().T)


def test_a_tensor_of_several_chunks():
    tensor = torch.ones(2 * CHUNK + 3, dtype=torch.int64)
    assert int(checksum(tensor)) == 2 * CHUNK + 3
    assert checksums({"a": tensor, "b": torch.tensor(True), "c": torch.empty(0)}) == {
        "a": 2 * CHUNK + 3,
        "b": 1,
        "c": 0,
    }


def test_negative_zero_and_nan_are_bits():
    assert checksum(torch.tensor([-0.0])) != checksum(torch.tensor([0.0]))
    nan = torch.tensor([float("nan")])
    assert checksum(nan) == checksum(nan.clone())


@pytest.mark.parametrize(
    ("sums", "ranks"),
    [
        ([{"w": 1}, {"w": 1}, {"w": 1}], None),
        ([{"w": 1}, {"w": 2}, {"w": 1}], [1]),
        ([{"w": 1}, {"w": 2}], [0, 1]),
        ([{"w": 1}, {"w": 2}, {"w": 3}], [0, 1, 2]),
        ([{"w": 1}, {"w": 1}, {"w": 2}, {"w": 2}], [0, 1, 2, 3]),
        ([{"w": 1}, {"w": 1}, {"w": 2}, {"w": 1}], [2]),
        ([{"a": 1}, {"b": 2}, {}], None),
        ([{"w": 1, "a": 1}, {"w": 1, "a": 2}, {"w": 2, "a": 1}], [1, 2]),
    ],
)
def test_who_is_odd(sums, ranks):
    found = find_difference(sums)
    assert (found.ranks if found else None) == ranks


def test_several_ranks_that_differ_from_most():
    found = find_difference([{"w": 1, "a": 1}, {"w": 1, "a": 2}, {"w": 2, "a": 1}])
    assert str(found) == "ranks 1, 2 hold other copies than the rest of w (and 1 more)"


def test_the_message():
    found = find_difference([{"w": 1, "a": 1}, {"w": 2, "a": 2}, {"w": 1, "a": 1}])
    assert str(found) == "rank 1 holds another copy than the others of w (and 1 more)"
    assert str(find_difference([{"w": 1}, {"w": 2}])) == (
        "one of the ranks 0, 1 holds a damaged copy of w"
    )
