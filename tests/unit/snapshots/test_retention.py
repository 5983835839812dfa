"""Pruning deletes old snapshots and keeps the newest, the best and the milestones."""

from __future__ import annotations

import pytest
from snapshot_helpers import commit, small_snapshot

from mingpt_ddp.snapshots.format import MANIFEST, MODEL, directory_name
from mingpt_ddp.snapshots.write.retention import prune


@pytest.mark.parametrize(
    ("keep_last", "best", "left"),
    [(1, None, [5]), (2, None, [4, 5]), (2, 1, [1, 4, 5]), (1, 5, [5]), (9, None, [1, 2, 3, 4, 5])],
)
def test_prune(keep_last, best, left, store):
    for step in range(1, 6):
        commit(store, small_snapshot(step))
    prune(store, keep_last, best, newest=5)
    assert store.steps() == left
    assert [store.read(step).step for step in left] == left


def test_prune_deletes_unfinished_snapshots_and_does_not_count_them(store):
    for step in range(1, 6):
        commit(store, small_snapshot(step))
    store.storage.delete(f"{directory_name(4)}/{MANIFEST}")
    prune(store, keep_last=2, best=None, newest=5)
    assert store.steps() == [3, 5]


def test_prune_keeps_milestones_that_are_whole(store):
    for step in range(1, 10):
        commit(store, small_snapshot(step))
    store.storage.delete(f"{directory_name(6)}/{MANIFEST}")
    prune(store, keep_last=1, best=1, newest=9, every=2)
    assert store.steps() == [1, 2, 4, 8, 9]


def test_prune_keeps_later_steps(store):
    """After resuming from an older snapshot, newer ones stay until the run reaches their steps."""
    for step in (1, 2, 3, 8, 9):
        commit(store, small_snapshot(step))
    prune(store, keep_last=1, best=None, newest=3)
    assert store.steps() == [3, 8, 9]


def test_damaged_snapshots_do_not_count_as_kept(store):
    for step in (4, 8, 12):
        commit(store, small_snapshot(step))
    store.storage.write(f"{directory_name(12)}/{MODEL}", b"")
    assert store.read_latest().step == 8
    commit(store, small_snapshot(16))
    prune(store, keep_last=2, best=None, newest=16)
    assert [step for step in store.steps() if step != 12] == [8, 16]


def test_a_damaged_snapshot_that_is_saved_again_is_kept(store):
    for step in (4, 8):
        commit(store, small_snapshot(step))
    store.storage.write(f"{directory_name(8)}/{MODEL}", b"")
    assert store.read_latest().step == 4
    for step in (8, 12):
        commit(store, small_snapshot(step))
    prune(store, keep_last=2, best=None, newest=12)
    assert store.steps() == [8, 12]
