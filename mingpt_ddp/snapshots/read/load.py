"""Find and load snapshots.

The URL may name a run directory, the directory of a run's snapshots, or one snapshot.
"""

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

# Selects a snapshot. "best" is the one with the lowest validation loss.
Step: TypeAlias = int | Literal["newest", "best"]
URL_ADVICE = "name a run directory, the directory of its snapshots, or one snapshot"


def locations(url: str) -> Iterator[str]:
    """Yield the URLs at which the snapshots of a run may be.

    The configuration of the run's last start may name a location outside the run directory. Then
    that location comes first.

    Args:
        url: URL of the run directory, or of the directory of its snapshots.
    """
    if recorded := _recorded_url(url):
        yield recorded
    yield from (f"{url}/snapshots", url)


def _open_store(url: str) -> SnapshotStore:
    """Open the snapshots at a URL. Raise a SnapshotError if the URL cannot be opened."""
    try:
        check_can_open("URL", url)
    except ConfigError as error:  # the URL may have been recorded on another machine
        raise SnapshotError(f"cannot list snapshots: {error.args[0]}") from error
    return SnapshotStore(url)


def _first_store(urls: Iterable[str]) -> tuple[SnapshotStore, list[int]] | None:
    """Return the first store that has snapshots, committed or not, and its steps.

    Return None if there are no snapshots at any of the URLs.
    """
    for url in urls:
        store = _open_store(url)
        if steps := store.steps():
            return store, steps
    return None


def refuse_other_location(store: SnapshotStore, directory: Path) -> None:
    """Refuse to start a run from the beginning if it has snapshots at another location.

    Snapshots may be at the location in the configuration of the run's last start, or in the run
    directory.

    Args:
        store: The store at the configured location. It has no snapshots.
        directory: The run directory.

    Raises:
        SnapshotError: The other location has snapshots, or cannot be read. The message names it.
    """
    for url in locations(str(directory)):
        if url in (store.url, str(directory)):
            continue
        other_store = _open_store(url)
        if any(map(other_store.is_committed, other_store.steps())):
            where = redact(url)
            raise SnapshotError(
                f"the run has snapshots at {where}, but none at {redact(store.url)}; add "
                f"run.resume={where} to continue from them, or choose another run.name"
            )


def snapshot_to_resume(
    store: SnapshotStore, directory: Path, source: str | None, kinds: Sequence[str] = ()
) -> Snapshot | None:
    """Read the state of the snapshot that a run resumes from.

    Return None if the run starts from the beginning.

    Args:
        store: The store of the run's own snapshots.
        directory: The run directory.
        source: URL of the snapshot that run.resume names, as in `RunConfig.source`. It is used if
            the run has no snapshots of its own.
        kinds: Kinds of tensors to read from `source` as well, to find out now if they are damaged.

    Raises:
        SnapshotError: This version cannot read the format in which the snapshot was written, or the
            run has snapshots at another location only.
        StorageUnavailableError: The store does not respond.
    """
    if newest := store.newest_state():
        return newest
    if source:
        return load(source, kinds)
    refuse_other_location(store, directory)
    return None


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """Return the store and the step of the snapshot that a URL names.

    Return None if the last part of the URL is not the name of a snapshot.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    step = layout.step_of(last)
    if step is None:
        return None
    return SnapshotStore(parent or "."), step


def find_steps(url: str) -> tuple[SnapshotStore, list[int]]:
    """List the steps of the snapshots at a URL, committed or not. Return their store too.

    A run directory may be untrusted. Its symbolic links are therefore not followed, and snapshots
    at the location that its configuration names are not listed.

    Args:
        url: URL of a run directory, of a directory of snapshots, or of one snapshot.

    Raises:
        SnapshotError: There are no snapshots at the URL. The message names the location in the
            configuration, if there is one.
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
    advice = (
        f"the run saves them at {redact(elsewhere)}: name that URL" if elsewhere else URL_ADVICE
    )
    raise SnapshotError(f"there are no snapshots at {url}{_if_missing(url)}; {advice}")


def load(
    url: str,
    kinds: Sequence[str] = layout.REQUIRED_KINDS,
    step: Step = "newest",
    whole: bool = True,
) -> Snapshot:
    """Find a snapshot and read it.

    Args:
        url: URL of a run directory, of a directory of snapshots, or of one snapshot.
        kinds: Kinds of tensors to read. The other kinds are left empty.
        step: Step of the snapshot, or "newest" or "best". "newest" skips damaged snapshots.
        whole: True reads the tensors. False reads only an index of their positions: see
            `StoreReader.read`.

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
            raise SnapshotError(
                f"there is no whole snapshot at {url}{_if_missing(url)}; {URL_ADVICE}"
            )
        store, steps = found
        wanted = step
    if wanted == "best":
        wanted = _best_step(store, steps)
    if wanted not in steps:
        raise SnapshotError(
            f"there is no snapshot with step={wanted} at {url}; the newest one is from step "
            f"{steps[-1]}"
        )
    try:
        return store.read(wanted, kinds, whole)
    except CorruptSnapshotError as damage:
        where = f"{store.url}/{layout.directory_name(wanted)}"
        raise SnapshotError(f"{where} cannot be used: {damage}") from damage


def _if_missing(url: str) -> str:
    """Return ", which does not exist" if a URL names a missing local directory, else ""."""
    storage = open_storage(url)
    if storage.has_flock and not os.path.lexists(storage.root):
        return ", which does not exist"
    return ""


def _best_step(store: SnapshotStore, steps: list[int]) -> int | str:
    """Return the best step, as recorded in the newest state that can be read.

    Return "best" if no best step is recorded. The caller then finds that there is no such snapshot.
    """
    for step in reversed(steps):
        with contextlib.suppress(CorruptSnapshotError):
            _, state = store.read_metadata(step)
            best = recorded_train_state(state).get("best_step")
            return best if type(best) is int else "best"
    return "best"


def recorded_train_state(state: Any) -> dict[str, Any]:
    """Return the unchecked train state in the values of a state.json, or {} if there is none."""
    train_state = state.get("train_state") if isinstance(state, dict) else None
    return train_state if isinstance(train_state, dict) else {}


def _is_link(url: str) -> bool:
    storage = open_storage(url)
    return storage.has_flock and os.path.islink(storage.root)


def _recorded_url(run: str) -> str | None:
    """Return the URL of a run's snapshots, from the configuration that its last start recorded.

    Return None if the snapshots are inside the run directory.

    Args:
        run: URL of the run directory.
    """
    recorded = None
    # Reading ends with an exception after the last configuration file, or at once if this is not a
    # run directory.
    with contextlib.suppress(Exception):
        directory = open_storage(run)
        for number in itertools.count(1):
            name = "config.yaml" if number == 1 else f"config.{number}.yaml"
            content = directory.read(name, limit=MAX_YAML_BYTES + 1)
            with contextlib.suppress(Exception):  # invalid content: no run has written this file
                recorded = _url_in(load_yaml(content), directory.root)
    return recorded


def _url_in(config: Any, directory: str) -> str | None:
    """Return the URL of a run's snapshots, or None if they are inside the run directory.

    Args:
        config: The untrusted configuration of the run.
        directory: Path of the run directory.
    """
    path = config["snapshot"].get("path")
    # Refuse a chained URL (a::b), because it could open a filesystem that writes, or executes
    # what it reads. A configuration from a run of this package never has a chained snapshot.path.
    if not isinstance(path, str) or "::" in path:
        return None
    # The number of parts of the run's name: "sweep/job" has two.
    depth = (config["run"]["name"] or "").count("/") + 1
    # Take the name from the directory. It may be run.name with a number added, such as run-2.
    name = "/".join(directory.rstrip("/").split("/")[-depth:])
    return f"{path.removesuffix('/')}/{name}"
