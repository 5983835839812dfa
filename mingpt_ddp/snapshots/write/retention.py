"""Retention: which snapshots of a run to keep, and deleting the others after a commit."""

import logging
from collections.abc import Sequence

from mingpt_ddp.config.keys.schema import SnapshotConfig
from mingpt_ddp.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)


def apply_retention(
    snapshot: SnapshotConfig,
    stores: Sequence[SnapshotStore],
    newest: int,
    best: int | None,
    store: SnapshotStore,
) -> None:
    """Delete what a store need not keep once it has the snapshot of step `newest`.

    If another process has taken over the store, log that and delete nothing: the next save ends the
    run.

    Args:
        stores: of the run: the first, and its fallbacks.
        best: step of the snapshot that snapshot.keep_best keeps.
        store: the one of them that has the snapshot.
    """
    every = snapshot.keep_every
    try:
        if not store.is_committed(newest):
            return
        prune(store, snapshot.keep_last, best, newest, every)
        if store is not stores[0]:
            return
        # The fallbacks were needed only while the first store failed.
        for fallback in stores[1:]:
            for step in fallback.steps():
                is_milestone = every is not None and step % every == 0
                if step < newest and step != best and not is_milestone:
                    fallback.delete(step)
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
        RunError: another process has taken over the lease.
    """
    for step in expired_steps(store, keep_last, best, newest, every):
        store.delete(step)
