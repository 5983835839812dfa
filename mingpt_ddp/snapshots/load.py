"""Find snapshots by URL: of a run directory, of a directory of snapshots, or one snapshot."""

import logging
from collections.abc import Iterator, Sequence

from mingpt_ddp.errors import ConfigError, SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.format import KINDS, MAX_CONFIG_CHARS, CorruptSnapshotError, Snapshot, step_of
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.urls import check_url, open_storage

log = logging.getLogger(__name__)


def candidate_stores(url: str) -> Iterator[SnapshotStore]:
    """Yield the stores that may hold the snapshots of a run directory or of a directory of snapshots.

    Raises:
        SnapshotError: one of their URLs cannot be opened here.
    """
    for candidate in (f"{url}/snapshots", url, *_recorded_urls(url)):
        try:
            check_url(candidate, "URL")
        except ConfigError as error:  # the run was on another machine
            raise SnapshotError(f"cannot look for snapshots: {error.args[0]}") from error
        yield SnapshotStore(candidate)


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """Return the store and the step if the URL names one snapshot."""
    parent, _, last = url.rstrip("/").rpartition("/")
    step = step_of(last)
    return None if step is None else (SnapshotStore(parent or "."), step)


def find_steps(url: str) -> list[tuple[SnapshotStore, list[int]]]:
    """List the stores at a URL that have snapshots, committed or not, with their steps.

    Raises:
        SnapshotError: there are none.
    """
    if named := step_in(url):
        store, step = named
        found = [(store, [step])] if step in store.steps() else []
    else:
        found = [(s, steps) for s in candidate_stores(url.rstrip("/") or url) if (steps := s.steps())]
    if not found:
        raise SnapshotError(f"there are no snapshots at {url}; name a run directory, its snapshots or one of them")
    return found


def load(url: str, kinds: Sequence[str] = KINDS) -> Snapshot:
    """Read the newest snapshot of a run directory or of a directory of snapshots, or the one that the URL names.

    Args:
        kinds: which tensors to read; the others are left empty.

    Raises:
        SnapshotError: there is no undamaged snapshot.
    """
    url = url.rstrip("/")
    if named := step_in(url):
        store, step = named
        try:
            return store.read(step, kinds)
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


def _recorded_urls(run: str) -> list[str]:
    """Read from the run's config.yaml where else it writes snapshots, if it does."""
    try:
        directory = open_storage(run)
        recorded = load_yaml(directory.read("config.yaml", limit=MAX_CONFIG_CHARS))
        paths = [recorded["snapshot"].get("path"), recorded["snapshot"].get("fallback_path")]
        depth = (recorded["run"]["name"] or "").count("/") + 1  # sweep/job has 2 parts
    except Exception:  # not a run directory
        return []
    # A chained URL (a::b) could open a file system that runs what it reads, or writes; snapshot.path is never one.
    paths = [path for path in paths if isinstance(path, str) and "::" not in path]
    name = "/".join(directory.root.rstrip("/").split("/")[-depth:])  # the directory's: it may be run.name with a -2
    return [f"{path.removesuffix('/')}/{name}" for path in paths]
