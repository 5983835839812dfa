"""Small snapshots, committed the way the ranks of a run do."""

from __future__ import annotations

import json

import torch

from mingpt_ddp.snapshots.format import STATE, Snapshot, shard_tensors
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.snapshots.store import SnapshotStore


def commit(store: SnapshotStore, snapshot: Snapshot, writers: int = 1) -> None:
    """
    Args:
        writers: number of ranks that the tensors are sharded over, if there are enough tensors.
    """
    store.clear(snapshot.step)
    files = {}
    tensors = {"model": snapshot.model, "optimizer": snapshot.optimizer} | (
        {"ema": snapshot.ema} if snapshot.ema else {}
    )
    for share in shard_tensors(tensors, writers):
        files |= store.write_files(snapshot.step, {name: encode(tensors) for name, tensors in share.items()})
    files |= store.write_files(snapshot.step, {STATE: json.dumps(snapshot.state, indent=1).encode()})
    store.write_files(snapshot.step, store.make_manifest(snapshot.step, files))


def small_snapshot(step: int) -> Snapshot:
    """Make a snapshot whose tensors depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(5, 3, generator=generator)
    return Snapshot(
        step=step,
        model={"weight": weights, "bias": torch.zeros(3, dtype=torch.bfloat16), "count": torch.tensor(step)},
        optimizer={"weight:exp_avg": weights / 2, "weight:step": torch.tensor(float(step))},
        state={"train_state": {"step": step, "loss": 1.5, "best": None}, "vocabulary": "\n aä€😀"},
    )
