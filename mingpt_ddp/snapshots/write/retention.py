"""Retention: delete the snapshots of a run that are no longer kept, after a commit."""

import logging

from mingpt_ddp.config.keys.schema import SnapshotConfig
from mingpt_ddp.snapshots.write.store import SnapshotStore

log = logging.getLogger(__name__)


def apply_retention(
    snapshot: SnapshotConfig, store: SnapshotStore, newest: int, best: int | None
) -> None:
    """Delete the snapshots that are no longer kept, if step `newest` is committed.

    If another process has taken over the store, log that and delete nothing: the next save ends the
    run.

    Args:
        best: Step of the snapshot that snapshot.keep_best keeps.
    """
    try:
        if store.is_committed(newest):
            prune(store, snapshot.keep_last, best, newest, snapshot.keep_every)
    except Exception as error:  # the new snapshot is committed nevertheless
        log.warning("cannot delete older snapshots at %s: %s", store.url, error)


def expired_steps(
    store: SnapshotStore, keep_last: int, best: int | None, newest: int, every: int | None = None
) -> list[int]:
    """List the steps up to `newest` that are not kept.

    Kept are the last `keep_last` committed ones, the `best` one, and milestones: the committed
    steps that `every` divides. Directories beyond `newest` are from before the run resumed from an
    older snapshot. They are kept until the run saves those steps again.
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
    """Delete the expired steps.

    Raises:
        RunError: Another process has taken over the lease.
    """
    for step in expired_steps(store, keep_last, best, newest, every):
        store.delete(step)
