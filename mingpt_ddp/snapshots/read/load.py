"""Find and load snapshots: the URL may name a run directory, its snapshots, or one snapshot."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import CorruptSnapshotError, Snapshot
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.remote.remote_errors import redact
from mingpt_ddp.storage.urls import check_can_open, open_storage
from mingpt_ddp.storage.yaml_and_json import MAX_YAML_BYTES, load_yaml

Step: TypeAlias = int | Literal["newest", "best"]  # the best has the lowest validation loss
ADVICE = "name a run directory, its snapshots or one of them"


def locations(url: str) -> Iterator[str]:
    """Yield the URLs that may hold the snapshots of a run directory or of a directory of snapshots.

    The location that the configuration of the run's last start names comes first.
    """
    if recorded := _recorded_url(url):
        yield recorded
    yield from (f"{url}/snapshots", url)


def _open_store(url: str) -> SnapshotStore:
    try:
        check_can_open("URL", url)
    except ConfigError as error:  # the URL may have been recorded on another machine
        raise SnapshotError(f"cannot list snapshots: {error.args[0]}") from error
    return SnapshotStore(url)


def _first_store(urls: Iterable[str]) -> tuple[SnapshotStore, list[int]] | None:
    """Return the first store that has snapshots, committed or not, and their steps."""
    for url in urls:
        store = _open_store(url)
        if steps := store.steps():
            return store, steps
    return None


def refuse_other_location(store: SnapshotStore, directory: Path) -> None:
    """Refuse to start a run from the beginning while the store of its last start has snapshots.

    Args:
        store: The store of the run, which has no snapshots.

    Raises:
        SnapshotError: The other store has snapshots, or cannot be read. The error names it.
    """
    for url in locations(str(directory)):
        if url in (store.url, str(directory)):
            continue
        other = _open_store(url)
        if any(map(other.is_committed, other.steps())):
            where = redact(url)
            raise SnapshotError(
                f"the run has snapshots at {where}, but none at {redact(store.url)}; add "
                f"run.resume={where} to go on from there, or choose another run.name"
            )


def snapshot_to_resume(
    store: SnapshotStore, directory: Path, source: str | None, kinds: Sequence[str] = ()
) -> Snapshot | None:
    """Read the state of the snapshot that a run resumes from. Return None if there is none.

    Args:
        store: Store of the run's snapshots.
        directory: Directory of the run.
        source: As `RunConfig.source`.
        kinds: Kinds of tensors to read from `source`, because they may be damaged.

    Raises:
        SnapshotError: The snapshot has the format of another version, or is elsewhere.
        StorageUnavailableError: The store does not respond.
    """
    if newest := store.newest_state():
        return newest
    if source:
        return load(source, kinds)
    refuse_other_location(store, directory)
    return None


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """Return the store and the step if the URL names one snapshot."""
    parent, _, last = url.rstrip("/").rpartition("/")
    step = layout.step_of(last)
    if step is None:
        return None
    return SnapshotStore(parent or "."), step


def find_steps(url: str) -> tuple[SnapshotStore, list[int]]:
    """List the snapshots of a run directory or of a directory of snapshots, committed or not.

    A run directory may be untrusted. So this follows neither a symbolic link in it nor the location
    that its configuration names.

    Raises:
        SnapshotError: There are no snapshots. The message names the location in the configuration.
    """
    if named := step_in(url):
        store, step = named
        if step in store.steps():
            return store, [step]
    url = url.rstrip("/") or url
    is_link = _is_link(f"{url}/snapshots")
    if found := _first_store([url] if is_link else [f"{url}/snapshots", url]):
        return found
    elsewhere = f"{url}/snapshots" if is_link else _recorded_url(url)
    advice = f"the run saves them at {redact(elsewhere)}: name that" if elsewhere else ADVICE
    raise SnapshotError(f"there are no snapshots at {url}{_if_missing(url)}; {advice}")


def load(
    url: str, kinds: Sequence[str] = layout.KINDS, step: Step = "newest", whole: bool = True
) -> Snapshot:
    """Read a snapshot of a run directory or a directory of snapshots, or the one at the URL.

    Args:
        kinds: Kinds of tensors to read. The others are left empty.
        step: Step of the snapshot. `newest` skips damaged snapshots.
        whole: See SnapshotStore.read.

    Raises:
        SnapshotError: There is no such snapshot, or it is damaged.
    """
    url = url.rstrip("/") or url
    if named := step_in(url):
        store, only = named
        steps = [only]
        wanted: Any = only if step == "newest" else step
    else:
        found = _first_store(locations(url))
        if found and step == "newest" and (newest := found[0].read_latest(kinds, whole)):
            return newest
        if not found or step == "newest":
            raise SnapshotError(f"there is no whole snapshot at {url}{_if_missing(url)}; {ADVICE}")
        store, steps = found
        wanted = step
    if wanted == "best":
        wanted = _best_step(store, steps)
    if wanted not in steps:
        raise SnapshotError(
            f"there is no snapshot of step {wanted} at {url}; the newest is of step {steps[-1]}"
        )
    try:
        return store.read(wanted, kinds, whole)
    except CorruptSnapshotError as damage:
        where = f"{store.url}/{layout.directory_name(wanted)}"
        raise SnapshotError(f"{where} cannot be used: {damage}") from damage


def _if_missing(url: str) -> str:
    storage = open_storage(url)
    if storage.has_flock and not os.path.lexists(storage.root):
        return ", which does not exist"
    return ""


def _best_step(store: SnapshotStore, steps: list[int]) -> int | str:
    """Return the best step that the newest readable state records, or "best" if it has none."""
    for step in reversed(steps):
        with contextlib.suppress(CorruptSnapshotError):
            _, state = store.read_metadata(step)
            best = recorded_train_state(state).get("best_step")
            return best if type(best) is int else "best"
    return "best"


def recorded_train_state(state: Any) -> dict[str, Any]:
    """Return the unchecked train state in a state.json, or {} if it has none."""
    train_state = state.get("train_state") if isinstance(state, dict) else None
    return train_state if isinstance(train_state, dict) else {}


def _is_link(url: str) -> bool:
    storage = open_storage(url)
    return storage.has_flock and os.path.islink(storage.root)


def _recorded_url(run: str) -> str | None:
    """Return the snapshot.path that the last start of a run recorded, as a URL.

    Return None if the snapshots are inside the run directory.
    """
    recorded = None
    with contextlib.suppress(Exception):  # not a run directory, or no more config files
        directory = open_storage(run)
        for number in itertools.count(1):
            name = "config.yaml" if number == 1 else f"config.{number}.yaml"
            content = directory.read(name, limit=MAX_YAML_BYTES + 1)
            with contextlib.suppress(Exception):  # no run has written this file
                recorded = _url_in(load_yaml(content), directory.root)
    return recorded


def _url_in(config: Any, directory: str) -> str | None:
    """Return the URL of the snapshots, if a configuration puts them outside the run directory."""
    path = config["snapshot"].get("path")
    # A chained URL (a::b) could open a filesystem that executes what it reads, or writes;
    # snapshot.path is never one.
    if not isinstance(path, str) or "::" in path:
        return None
    depth = (config["run"]["name"] or "").count("/") + 1  # sweep/job has 2 parts
    # Take the name from the directory, because it may be run.name with a number: run-2.
    name = "/".join(directory.rstrip("/").split("/")[-depth:])
    return f"{path.removesuffix('/')}/{name}"
