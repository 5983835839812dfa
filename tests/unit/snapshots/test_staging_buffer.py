"""The safetensors library can read the files that we write with a precomputed layout."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots import staging_buffer, tensor_index
from mingpt_ddp.snapshots.staging_buffer import (
    DTYPES,
    SafetensorsBuffer,
    encode,
)


def make_tensors(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(1, 1 + torch.Size(shape).numel()) % 100).reshape(shape).to(dtype)


def decode(content: bytes) -> dict[str, torch.Tensor]:
    return tensor_index.decode({"file": content})


MIXED = {
    "bool": make_tensors(torch.bool, 3),
    "bytes": make_tensors(torch.uint8, 5),
    "half": make_tensors(torch.float16, 3, 3),
    "brain": make_tensors(torch.bfloat16, 7),
    "float": make_tensors(torch.float32, 2, 3, 4),
    "double": make_tensors(torch.float64, 3),
    "whole": make_tensors(torch.int64, 2),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    'name with " and ä': torch.ones(1),
}


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


def test_the_library_reads_it():
    content = bytes(encode(MIXED))
    check_equal(safetensors.torch.load(content), MIXED)
    check_equal(decode(content), MIXED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype):
    check_equal(
        safetensors.torch.load(bytes(encode({"x": make_tensors(dtype, 3, 2)}))),
        {"x": make_tensors(dtype, 3, 2)},
    )


def test_every_tensor_is_aligned():
    """Readers may map the file into memory."""
    content = bytes(encode(MIXED))
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(content[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % MIXED[name].element_size() == 0, name


def test_the_order_of_the_names_does_not_matter():
    assert bytes(encode(MIXED)) == bytes(encode(dict(reversed(MIXED.items()))))


def test_strides_do_not_matter():
    values = make_tensors(torch.float32, 4, 6)
    check_equal(
        decode(bytes(encode({"x": values.T, "y": values[:, ::2]}))),
        {"x": values.T, "y": values[:, ::2]},
    )


def test_refilling_reuses_the_memory():
    buffer = SafetensorsBuffer(MIXED)
    buffer.fill(MIXED)
    first, address = bytes(buffer.content), buffer.content.obj.ctypes.data
    changed = {name: ~t if t.dtype == torch.bool else t + 1 for name, t in MIXED.items()}
    assert buffer.fits(changed)
    buffer.fill(changed)
    assert bytes(buffer.content) == bytes(encode(changed)) != first
    assert buffer.content.obj.ctypes.data == address


def test_a_buffer_fits_tensors_of_the_same_names_shapes_and_types():
    buffer = SafetensorsBuffer({"a": torch.ones(2, 3)})
    assert buffer.fits({"a": torch.zeros(2, 3)})
    assert not buffer.fits({"a": torch.ones(3, 2)})
    assert not buffer.fits({"a": torch.ones(2, 3, dtype=torch.float64)})
    assert not buffer.fits({"b": torch.ones(2, 3)})
    assert not buffer.fits({"a": torch.ones(2, 3), "b": torch.ones(1)})
    assert not buffer.fits({})


def test_a_header_that_could_not_be_read_is_not_written(monkeypatch):
    tensors = {f"layer.{i}.weight": torch.ones(1) for i in range(50)}
    size = int.from_bytes(bytes(encode(tensors))[:8], "little")
    monkeypatch.setattr(staging_buffer, "MAX_HEADER_BYTES", size + 8)
    assert len(decode(bytes(encode(tensors)))) == 50
    for module in (staging_buffer, tensor_index):
        monkeypatch.setattr(module, "MAX_HEADER_BYTES", size - 8)
    with pytest.raises(ValueError, match="header is too large"):
        decode(size.to_bytes(8, "little"))
    with pytest.raises(SnapshotError, match="a snapshot of 50 tensors could not be read again"):
        encode(tensors)
