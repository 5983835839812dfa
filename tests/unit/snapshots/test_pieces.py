"""Tensors are stored in pieces of rows, then merged or read in part. Hostile ones are refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.format import STATE, CorruptSnapshotError, shard_name
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.snapshots.tensor_index import decode, read_header, read_rows
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.urls import open_storage

WEIGHT = torch.arange(35.0).view(7, 5)
URLS = pytest.mark.parametrize("protocol", ["file", "memory"])


def split(name: str, tensor: torch.Tensor, bounds: list[int]) -> list[dict[str, torch.Tensor]]:
    edges = zip([0, *bounds], [*bounds, len(tensor)], strict=True)
    return [{f"{name}@{a}-of-{len(tensor)}": tensor[a:b]} for a, b in edges]


def write(store: SnapshotStore, files: list[dict[str, Any]], step: int = 1) -> None:
    """Commit a snapshot. Rank i writes the i-th entry: tensors of the model, or bytes."""
    contents = {STATE: json.dumps({"train_state": {"step": step}}).encode()}
    for i, named in enumerate(files):
        content = named if isinstance(named, bytes) else encode(named)
        contents |= {
            shard_name("model", i, len(files)): content,
            shard_name("optimizer", i, len(files)): encode({}),
        }
    store.commit(step, [store.write_files(step, contents)])


@pytest.fixture
def at(tmp_path):
    """Return a function that opens a store on a local disk, or in fsspec's memory filesystem."""
    return lambda protocol: SnapshotStore(
        str(tmp_path) if protocol == "file" else f"memory://{tmp_path}"
    )


@URLS
def test_pieces_are_merged(at, protocol):
    store = at(protocol)
    first, second, third = split("w", WEIGHT, [3, 4])
    write(store, [third | {"b": torch.ones(2)}, first | {"n": torch.tensor(5)}, second])
    model = store.read(1).model
    assert sorted(model) == ["b", "n", "w"]
    assert torch.equal(model["w"], WEIGHT)


@URLS
def test_rows_are_read_from_any_pieces(at, protocol):
    store = at(protocol)
    half = WEIGHT.to(torch.bfloat16)
    write(
        store,
        [a | b for a, b in zip(split("w", WEIGHT, [2, 6]), split("h", half, [5, 6]), strict=True)],
    )
    write(store, [{"w": WEIGHT, "h": half, "n": torch.tensor(5)}], step=2)
    for step in (1, 2):
        index = store.read(step, whole=False).index
        assert index["url"] == store.url
        for first in range(8):
            for end in range(first, 8):
                found = [
                    read_rows(store.storage.chunks, index["model"][k], first, end) for k in "wh"
                ]
                assert torch.equal(found[0], WEIGHT[first:end])
                assert torch.equal(found[1], half[first:end])
    assert read_rows(store.storage.chunks, index["model"]["n"], 0, 1) == torch.tensor(5)


def test_an_index_checks_every_byte(at, tmp_path):
    store = at("file")
    write(store, split("w", WEIGHT, [3]))
    file = tmp_path / "step_00000001" / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match="does not have the content"):
        store.read(1, whole=False)


def test_a_file_that_shrinks_while_it_is_read(at, tmp_path):
    store = at("file")
    write(store, [{"w": WEIGHT}])
    index = store.read(1, whole=False).index
    file = tmp_path / "step_00000001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OSError, match="changed"):
        read_rows(store.storage.chunks, index["model"]["w"], 0, 7)


ROW = torch.zeros(1, 2)
HOSTILE = {
    "overlapping": {"w@0-of-3": torch.zeros(2, 2), "w@1-of-3": torch.zeros(2, 2)},
    "a gap": {"w@0-of-3": ROW, "w@2-of-3": ROW},
    "the first is missing": {"w@1-of-2": ROW},
    "the last is missing": {"w@0-of-2": ROW},
    "too many rows": {"w@0-of-1": torch.zeros(2, 2)},
    "other totals": {"w@0-of-2": ROW, "w@1-of-3": ROW},
    "other widths": {"w@0-of-2": ROW, "w@1-of-2": torch.zeros(1, 3)},
    "other types": {"w@0-of-2": ROW, "w@1-of-2": ROW.double()},
    "a scalar": {"w@0-of-1": torch.tensor(1.0)},
    "no rows": {"w@0-of-0": torch.zeros(0, 2)},
    "an absurd number of rows": {"w@0-of-999999999999999": ROW},
    "whole and in pieces": {"w": ROW, "w@0-of-1": ROW},
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("named", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pieces(at, named, whole):
    store = at("file")
    write(store, [{name: tensor} for name, tensor in named.items()])
    with pytest.raises(SnapshotError) as refused:
        load(f"{store.url}/step_00000001", whole=whole)
    assert "\n" not in str(refused.value)
    assert "the pieces of w " in str(refused.value)


def test_a_name_with_a_negative_row_is_an_ordinary_name():
    assert list(decode({"file": bytes(encode({"w@-1-of-3": ROW}))})) == ["w@-1-of-3"]


def file_with(header: Any, data: bytes = b"\0" * 8) -> bytes:
    encoded = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(encoded)) + encoded + data


def tensor(shape: Any, end: Any = 8, dtype: str = "F32", begin: Any = 0) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


HEADERS = {
    "negative size": tensor([-1, 2]),
    "absurd size": tensor([10**12, 10**12]),
    "absurd size of no bytes": tensor([0, 2**62, 2**62], 0),
    "a dimension of more than 63 bits": tensor([0, 2**63], 0),
    "more than the file": tensor([4], 16),
    "negative offset": tensor([2], 0, begin=-8),
    "unknown type": tensor([2], dtype="F128"),
    "no shape": {"w": {"dtype": "F32", "data_offsets": [0, 8]}},
    "a string": tensor("22"),
    "fractions": tensor([2.0]),
    "fractional offsets": {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
    "two tensors of the same bytes": tensor([2]) | {"v": tensor([2])["w"]},
    "a gap": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "bytes of no tensor": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "not JSON": b"{]",
    "a list": [1],
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_hostile_headers(at, header):
    content = file_with(header)
    with pytest.raises(ValueError, match=r"."):
        read_header(content, len(content))
    store = at("file")
    write(store, [content])
    for whole in (True, False):
        with pytest.raises(SnapshotError) as refused:
            load(f"{store.url}/step_00000001", whole=whole)
        assert "\n" not in str(refused.value)


def test_a_tensor_in_two_files(at):
    store = at("file")
    write(store, [{"w": torch.ones(2)}, {"w": torch.zeros(2)}])
    for whole in (True, False):
        with pytest.raises(SnapshotError, match="two files"):
            load(f"{store.url}/step_00000001", whole=whole)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_any_header_is_read_or_refused(content):
    data = struct.pack("<Q", len(content)) + content
    try:
        for entry in read_header(data, len(data)).values():
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            assert entry.offset + tensor.nbytes <= len(data)
    except ValueError:
        pass


@URLS
def test_a_range_of_a_file(at, protocol, monkeypatch):
    from mingpt_ddp.storage import storage
    from mingpt_ddp.storage.remote import remote

    monkeypatch.setattr(storage, "CHUNK_BYTES", 3)
    monkeypatch.setattr(remote, "PART_BYTES", 3)
    files, content = open_storage(at(protocol).url), bytes(range(50))
    files.write("file", content)
    for start, size in ((0, 50), (7, 0), (7, 1), (5, 30), (49, 1)):
        assert b"".join(files.chunks("file", size, start)) == content[start : start + size]
