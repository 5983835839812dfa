"""A process whose lease was taken over does not damage the snapshots of its successor.

memory:// stands in for the object store. tests/e2e/test_s3_takeover.py stops real runs.
"""

from __future__ import annotations

import uuid

import pytest
from snapshot_helpers import commit, small_snapshot

from mingpt_ddp.errors import RunError
from mingpt_ddp.snapshots.format import MODEL, directory_name
from mingpt_ddp.snapshots.write.retention import prune
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.lease import Lease


class Owner:
    """A run that holds the lease of a store."""

    def __init__(self, url: str, before: Owner | None = None) -> None:
        self.store = SnapshotStore(url)
        self.lease = Lease(self.store.storage, dead_owner=before.lease.id if before else None)
        self.store.hold(self.lease)

    def save(self, step: int) -> None:
        self.store.begin(step)
        commit(self.store, small_snapshot(step))


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/snapshots"


@pytest.fixture
def old(url):
    """Create an owner that has committed step 4 and is then suspended."""
    owner = Owner(url)
    owner.save(4)
    yield owner
    owner.lease.release()


@pytest.fixture
def new(url, old):
    """Create the successor of the suspended owner."""
    owner = Owner(url, before=old)
    yield owner
    owner.lease.release()


def whole_steps(store: SnapshotStore) -> list[int]:
    return [store.read(step).step for step in store.steps() if store.is_committed(step)]


def test_the_old_owner_deletes_nothing(old, new):
    new.save(8)
    for call in (
        lambda: old.store.begin(8),
        lambda: old.store.begin(12),
        lambda: old.store.delete(4),
        lambda: prune(old.store, keep_last=1, best=None, newest=8),
    ):
        with pytest.raises(RunError, match="was taken over by process"):
            call()
    assert whole_steps(new.store) == [4, 8]


def test_a_step_that_another_start_has_committed_is_kept_without_its_lease(old, new):
    """Here the successor has ended, and has released its lease."""
    new.save(8)
    new.lease.release()
    with pytest.raises(RunError, match="was taken over by another process, which has committed"):
        old.store.begin(8)
    assert whole_steps(new.store) == [4, 8]


def test_steps_of_an_earlier_start_are_saved_again(old, new):
    """A run may resume from an older snapshot because the newest is damaged, and save it again."""
    new.save(4)
    new.save(4)
    assert whole_steps(new.store) == [4]


def test_a_deleted_step_belongs_to_the_process_that_commits_it_next(old, new):
    new.save(8)
    new.store.delete(8)
    commit(SnapshotStore(new.store.url), small_snapshot(8))
    with pytest.raises(RunError, match="was taken over by another process"):
        new.store.begin(8)


def test_files_without_a_manifest_are_overwritten(old):
    """A successor may have written the files and be about to commit them."""
    old.store.write_files(8, {MODEL: b"1"})
    old.store.begin(8)
    assert old.store.storage.size(f"{directory_name(8)}/{MODEL}") == 1
    old.save(8)
    assert whole_steps(old.store) == [4, 8]
