"""Where the snapshots are that a path or URL means: a run directory, a directory of snapshots or one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.format import KINDS, LARGEST_CONFIG, CorruptSnapshotError, Snapshot, step_of
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.storage import Storage

log = logging.getLogger(__name__)


def candidate_stores(url: str) -> Iterator[SnapshotStore]:
    """Where the snapshots of a run directory may be, or of a directory of snapshots.

    Raises:
        SnapshotError: one of the places cannot be reached from here.
    """
    for candidate in (f"{url}/snapshots", url, *_recorded_places(url)):
        try:
            yield SnapshotStore(candidate)
        except (ImportError, ValueError) as error:  # the protocol of another machine
            raise SnapshotError(f"cannot look for snapshots at {candidate}: {error}") from error


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """The store and the step that a URL names, if it names one snapshot."""
    parent, _, last = url.rstrip("/").rpartition("/")
    step = step_of(last)
    return None if step is None else (SnapshotStore(parent or "."), step)


def load(url: str, kinds: Sequence[str] = KINDS) -> Snapshot:
    """The newest snapshot at a run directory, a directory of snapshots or one snapshot.

    Args:
        kinds: which tensors are wanted; there are none of the others.

    Raises:
        SnapshotError: there is none.
    """
    url = url.rstrip("/")
    named = step_in(url)
    if named is not None:
        try:
            return named[0].read(named[1], kinds)
        except CorruptSnapshotError as damage:
            raise SnapshotError(f"{url} cannot be used: {damage}") from damage
    found: Snapshot | None = None
    try:
        for store in candidate_stores(url):
            if found is None or max(store.steps(), default=0) > found.step:
                found = max(found, store.read_latest(kinds), key=lambda snapshot: snapshot.step if snapshot else -1)
    except (StorageUnavailableError, SnapshotError) as error:
        if found is None:
            raise
        log.warning("%s", error)
    if found is None:
        raise SnapshotError(f"there is no whole snapshot at {url}; name a run directory, its snapshots or one of them")
    return found


def _recorded_places(run: str) -> list[str]:
    """Where a run directory says that it keeps its snapshots, if that is somewhere else."""
    try:
        directory = Storage(run)
        recorded = load_yaml(directory.read("config.yaml", limit=LARGEST_CONFIG))
        paths = [recorded["snapshot"].get("path"), recorded["snapshot"].get("fallback_path")]
        parts = (recorded["run"]["name"] or "").count("/") + 1  # sweep/job is two
    except Exception:  # it is no run directory of ours
        return []
    # A chain of URLs could name a file system that runs what it reads, or writes; snapshot.path is never one.
    paths = [path for path in paths if isinstance(path, str) and "::" not in path]
    name = "/".join(directory.root.rstrip("/").split("/")[-parts:])  # as it is now: a -2 may have come after run.name
    return [f"{path}{name}" if path.endswith("/") else f"{path}/{name}" for path in paths]
