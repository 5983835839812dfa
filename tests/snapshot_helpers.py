"""Snapshots that are at hand as a whole, committed as the ranks of a run would do it together."""

from __future__ import annotations

import json

from mingpt_ddp.snapshots.buffer import encode
from mingpt_ddp.snapshots.format import STATE, Snapshot, shard_tensors
from mingpt_ddp.snapshots.store import SnapshotStore


def commit(store: SnapshotStore, snapshot: Snapshot, writers: int = 1) -> None:
    """
    Args:
        writers: ranks over which the tensors are divided, if there are enough of them.
    """
    store.clear(snapshot.step)
    files = {}
    for share in shard_tensors({"model": snapshot.model, "optimizer": snapshot.optimizer}, writers):
        files |= store.write_files(snapshot.step, {name: encode(tensors) for name, tensors in share.items()})
    files |= store.write_files(snapshot.step, {STATE: json.dumps(snapshot.state, indent=1).encode()})
    store.write_files(snapshot.step, store.make_manifest(snapshot.step, files))
