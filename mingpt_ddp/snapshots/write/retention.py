"""Retention: after each commit, delete the snapshots that a run does not keep."""

import logging

from mingpt_ddp.config.keys.schema import SnapshotConfig
from mingpt_ddp.snapshots.write.store import SnapshotStore

log = logging.getLogger(__name__)


def apply_retention(
    snapshot: SnapshotConfig, store: SnapshotStore, newest: int, best: int | None
) -> None:
    """Delete the snapshots that the settings do not keep, if step `newest` is committed.

    An error is only logged, because the new snapshot is committed nevertheless. If the error is
    that another process has taken over the store, nothing is deleted, and the next save ends the
    run.

    Args:
        snapshot: The settings for snapshots.
        newest: Step of the newest snapshot.
        best: Step whose snapshot is kept because of snapshot.keep_best. None if there is none.
    """
    try:
        if store.is_committed(newest):
            prune(store, snapshot.keep_last, best, newest, snapshot.keep_every)
    except Exception as error:
        log.warning("cannot delete older snapshots at %s: %s", store.url, error)


def expired_steps(
    store: SnapshotStore, keep_last: int, best: int | None, newest: int, every: int | None = None
) -> list[int]:
    """List the steps up to `newest` whose snapshots are to be deleted.

    Three kinds of snapshots are kept: the last `keep_last` committed ones, the `best` one, and
    milestones, which are committed steps that are a multiple of `every`. Steps after `newest` are
    not listed. They are from a time before the run went back to an older snapshot, and are kept
    until the run saves these steps again.
    """
    past = [step for step in store.steps() if step <= newest]
    committed = [step for step in past if step not in store.damaged and store.is_committed(step)]
    kept = {newest, best, *committed[-keep_last:]}
    if every is not None:
        kept.update(step for step in committed if step % every == 0)
    return [step for step in past if step not in kept]


def prune(
    store: SnapshotStore, keep_last: int, best: int | None, newest: int, every: int | None = None
) -> None:
    """Delete the snapshots of the steps that `expired_steps` lists.

    Raises:
        RunError: Another process has taken over the lease.
    """
    for step in expired_steps(store, keep_last, best, newest, every):
        store.delete(step)
