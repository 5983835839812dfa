"""Reading snapshots: the files that are read, and the errors if some cannot be read."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_helpers import commit, small_snapshot

from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.format import (
    MANIFEST,
    MODEL,
    STATE,
    CorruptSnapshotError,
    encode_manifest,
)
from mingpt_ddp.snapshots.tensor_index import read_rows
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.remote.remote_errors import StorageError

OPTIMIZER = "optimizer.safetensors"
EMA = "ema.safetensors"
DIRECTORY = "step_00000008"


@pytest.fixture
def store(tmp_path) -> SnapshotStore:
    store = SnapshotStore(str(tmp_path))
    commit(store, small_snapshot(8))
    return store


def test_the_index_of_a_snapshot_finds_its_tensors(store):
    written = small_snapshot(8)
    found = store.read(8, whole=False)
    assert (found.step, found.model, found.optimizer, found.ema, found.state) == (
        8,
        {},
        {},
        {},
        written.state,
    )
    assert found.index["url"] == store.url
    for kind in ("model", "optimizer"):
        assert found.index[kind].keys() == getattr(written, kind).keys()
    weight = read_rows(store.storage.chunks, found.index["model"]["weight"], 1, 4)
    assert torch.equal(weight, written.model["weight"][1:4])
    of_model = store.read(8, ("model",), whole=False).index
    assert (of_model["model"], of_model["optimizer"], of_model["ema"]) == (
        found.index["model"],
        {},
        {},
    )


def test_reading_only_the_model_gives_its_averaged_weights(store):
    whole = small_snapshot(9)
    averaged = {name: tensor / 2 for name, tensor in whole.model.items()}
    commit(store, replace(whole, ema=averaged))
    assert store.files(9, ("model",)).keys() == {EMA, STATE}
    assert store.files(9).keys() == {MODEL, OPTIMIZER, EMA, STATE}
    for kinds, model, ema in (
        (("model",), averaged, averaged),
        (("model", "optimizer"), whole.model, {}),
        (("model", "optimizer", "ema"), whole.model, averaged),
    ):
        found = store.read(9, kinds)
        assert found.model.keys() == model.keys() and found.ema.keys() == ema.keys()
        assert all(torch.equal(found.model[name], tensor) for name, tensor in model.items())
    newest = store.newest_state()
    assert newest is not None
    assert (newest.step, newest.model, newest.optimizer, newest.ema) == (9, {}, {}, {})


def test_ignored_snapshots_are_logged(store, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    for step in (9, 10):
        commit(store, small_snapshot(step))
    store.storage.delete(f"step_00000010/{MANIFEST}")
    store.storage.delete(f"step_00000009/{MODEL}")
    found = store.read_latest(whole=False)
    assert found is not None
    assert (found.step, found.index["url"]) == (8, store.url)
    assert caplog.messages == [
        f"{store.url}/step_00000010 was never finished and is ignored",
        (
            f"damaged snapshot {store.url}/step_00000009 is ignored: {MODEL} is missing or has "
            "the wrong size"
        ),
    ]


def test_a_storage_that_does_not_respond_is_not_damage(store, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise StorageError("no answer")

    monkeypatch.setattr(store.storage, "chunks", refuse)
    with pytest.raises(
        StorageUnavailableError,
        match=r"^storage error: cannot read the snapshot of step 8: no answer$",
    ):
        store.read(8)
    monkeypatch.setattr(store.storage, "list", refuse)
    with pytest.raises(
        StorageUnavailableError, match=r"^storage error: cannot list snapshots at .*: no answer$"
    ):
        store.steps()
    monkeypatch.setattr(store.storage, "size", refuse)
    with pytest.raises(StorageError):
        store.is_committed(8)


def test_a_failing_disk_is_reported_as_damage_or_as_an_error_with_the_url(store, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise OSError("bad sector")

    monkeypatch.setattr(store.storage, "chunks", refuse)
    with pytest.raises(CorruptSnapshotError, match=rf"^{MANIFEST} cannot be read: bad sector$"):
        store.read(8)
    monkeypatch.setattr(store.storage, "list", refuse)
    with pytest.raises(SnapshotError) as refused:
        store.steps()
    message = f"snapshot error: cannot list snapshots at {store.url}: bad sector"
    assert str(refused.value) == message
    monkeypatch.setattr(store.storage, "size", refuse)
    assert not store.is_committed(8)


def test_verification_reports_its_progress(store):
    seen: list[int] = []
    headers = store.verify(8, seen.append)
    assert seen == [file["bytes"] for file in store.files(8).values()]
    assert headers.keys() == {MODEL, OPTIMIZER}


def test_a_header_of_another_size_is_damage(store):
    """It is damage even though all digests match."""
    files = store.files(8)
    content = Path(store.url, DIRECTORY, MODEL).read_bytes() + b"\0"
    files[MODEL] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    store.write_files(8, {MODEL: content, MANIFEST: encode_manifest(8, files)})
    with pytest.raises(
        CorruptSnapshotError, match=rf"^{MODEL} does not have the size that its header says$"
    ):
        store.verify(8)


def test_a_file_that_differs_is_named(store):
    state = Path(store.url, DIRECTORY, STATE)
    content = state.read_bytes()
    state.write_bytes(content.replace(b"1.5", b"1.6"))
    with pytest.raises(
        CorruptSnapshotError, match=rf"^{STATE} does not have the content that was written$"
    ):
        store.read_metadata(8)
    state.write_bytes(content[:-1])
    with pytest.raises(CorruptSnapshotError, match=rf"^{STATE} is missing or has the wrong size$"):
        store.read_metadata(8)
    state.write_bytes(content)
    listed = store.files(8)
    files = store.write_files(8, {STATE: b"{"})
    with pytest.raises(OSError, match=rf"^{MODEL} is missing or has the wrong size$"):
        store.commit(8, [files, {MODEL: {"bytes": 1}}])
    store.write_files(8, {MANIFEST: encode_manifest(8, listed | files)})
    with pytest.raises(CorruptSnapshotError, match=rf"^{STATE} cannot be parsed$"):
        store.read_metadata(8)
