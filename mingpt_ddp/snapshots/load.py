"""Find snapshots by the URL of a run directory, of a directory of snapshots, or of one snapshot."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mingpt_ddp.errors import ConfigError, SnapshotError, StorageUnavailableError, UserError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import CorruptSnapshotError, Snapshot
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.remote_errors import redact
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.urls import check_url, open_storage

log = logging.getLogger(__name__)

Step: TypeAlias = int | Literal["newest", "best"]  # best: with the lowest validation loss
ADVICE = "name a run directory, its snapshots or one of them"
ANSWER_TIMEOUT_S = 10.0  # for a store to list its snapshots for a command


def candidate_urls(url: str, follow: bool = True) -> Iterator[str]:
    """Yield the URLs that may hold the snapshots of a run directory or of a directory of snapshots.

    Args:
        follow: include those elsewhere that the run directory records.
    """
    yield from [url] if not follow and _linked_directory(url) else [f"{url}/snapshots", url]
    if follow:
        yield from _recorded_urls(url)


def _open_store(url: str) -> SnapshotStore:
    try:
        check_url(url, "URL")
    except ConfigError as error:  # recorded on another machine
        raise SnapshotError(f"cannot list snapshots: {error.args[0]}") from error
    return SnapshotStore(url)


def stores_of_run(stores: list[SnapshotStore], directory: Path) -> list[SnapshotStore]:
    """Return the stores of a run, and those of its earlier configurations.

    Raises:
        SnapshotError: a recorded URL cannot be opened on this machine.
    """
    own = {store.url for store in stores}
    return [
        *stores,
        *(
            store
            for store in map(_open_store, candidate_urls(str(directory)))
            if store.url not in own
        ),
    ]


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """Return the store and the step if the URL names one snapshot."""
    parent, _, last = url.rstrip("/").rpartition("/")
    step = layout.step_of(last)
    return None if step is None else (SnapshotStore(parent or "."), step)


def find_steps(
    url: str, follow: bool = True, strict: bool = True
) -> list[tuple[SnapshotStore, list[int]]]:
    """List the stores at a URL that have snapshots, committed or not, with their steps.

    Args:
        follow: include stores elsewhere that the run directory records; otherwise log one line that
            names them.
        strict: raise the error of any store; otherwise log it if another store has snapshots.

    Raises:
        SnapshotError: there are none.
        StorageUnavailableError: a store does not respond within ANSWER_TIMEOUT_S.
    """
    named = step_in(url)
    found = list[tuple[SnapshotStore, list[int]]]()
    url = url.rstrip("/") or url

    def list_steps(store: SnapshotStore) -> None:
        store.storage.set_deadline(ANSWER_TIMEOUT_S)
        if steps := [step for step in store.steps() if named is None or step == named[1]]:
            found.append((store, steps))
        store.storage.set_deadline(math.inf)

    errors = _ask_each([named[0].url] if named else candidate_urls(url, follow), url, list_steps)
    _raise_or_log(errors, bool(found) and not strict)
    elsewhere = [] if follow or named else [*_linked_directory(url), *_recorded_urls(url)]
    hint = (
        f"the run also has some at {redact(', '.join(elsewhere))}; add follow=true to include them"
    )
    if not found:
        raise SnapshotError(
            f"there are no snapshots at {url}{_if_missing(url)}; {hint if elsewhere else ADVICE}"
        )
    if elsewhere:
        log.warning("%s: %s", url, hint)
    return found


def load(
    url: str, kinds: Sequence[str] = layout.KINDS, step: Step = "newest", whole: bool = True
) -> Snapshot:
    """Read a snapshot from a run directory or a directory of snapshots, or the one that the URL
    names.

    Args:
        kinds: which tensors to read; the others are left empty.
        step: which one; `newest` skips damaged snapshots.
        whole: see SnapshotStore.read.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
    """
    url = url.rstrip("/") or url if step == "newest" else _find_url(url, step)
    if named := step_in(url):
        store, number = named
        try:
            return store.read(number, kinds, whole)
        except CorruptSnapshotError as damage:
            raise SnapshotError(f"{url} cannot be used: {damage}") from damage
    found: Snapshot | None = None

    def read_newer(store: SnapshotStore) -> None:
        nonlocal found
        if found is None or max(store.steps(), default=0) > found.step:
            found = max(
                found,
                store.read_latest(kinds, whole),
                key=lambda snapshot: snapshot.step if snapshot else -1,
            )

    errors = _ask_each(candidate_urls(url), url, read_newer)
    _raise_or_log(errors, found is not None)
    if found is None:
        raise SnapshotError(f"there is no whole snapshot at {url}{_if_missing(url)}; {ADVICE}")
    return found


def _if_missing(url: str) -> str:
    storage = open_storage(url)
    return ", which does not exist" if storage.local and not os.path.lexists(storage.root) else ""


def _ask_each(
    locations: Iterable[str], url: str, ask: Callable[[SnapshotStore], None]
) -> list[UserError]:
    """Call `ask` for the store at each location; return the errors of those that cannot be read.

    Skip `url` itself if its server has not responded for a subdirectory.
    """
    errors: list[UserError] = []
    for location in locations:
        if location == url and any(isinstance(error, StorageUnavailableError) for error in errors):
            continue
        try:
            ask(_open_store(location))
        except (StorageUnavailableError, SnapshotError) as error:
            errors.append(error)
    return errors


def _raise_or_log(errors: list[UserError], log_only: bool) -> None:
    """Raise the first error of several stores, or log all of them."""
    if errors and not log_only:
        raise errors[0]
    for error in errors:
        log.warning("%s", error)


def _find_url(url: str, step: int | str) -> str:
    """Return the URL of the snapshot of a step, or of the best one by the newest readable state.

    Raises:
        SnapshotError: there is none.
        StorageUnavailableError: no store that responds has snapshots.
    """
    found = [(number, store) for store, steps in find_steps(url, strict=False) for number in steps]
    wanted: Any = step
    for number, store in sorted(found, key=lambda pair: -pair[0]) if step == "best" else []:
        with contextlib.suppress(CorruptSnapshotError):
            best = recorded_train_state(store.read_metadata(number)[1]).get("best_step")
            wanted = best if type(best) is int else step
            break
    stores = [store for number, store in found if number == wanted]
    if not stores:
        raise SnapshotError(
            f"there is no snapshot of step {wanted} at {url}; the newest is of step "
            f"{max(dict(found))}"
        )
    # the first that has it whole, or else the first
    store = max(stores, key=lambda store: store.is_committed(wanted))
    return f"{store.url}/{layout.directory_name(wanted)}"


def recorded_train_state(state: Any) -> dict[str, Any]:
    """Return the train state in a state.json, unchecked; {} if it has none."""
    train_state = state.get("train_state") if isinstance(state, dict) else None
    return train_state if isinstance(train_state, dict) else {}


def _linked_directory(run: str) -> list[str]:
    """Return the target of `snapshots` in a local run directory if it is a symbolic link.

    Otherwise [].
    """
    storage = open_storage(f"{run}/snapshots")
    return (
        [os.path.realpath(storage.root)] if storage.local and os.path.islink(storage.root) else []
    )


def _recorded_urls(run: str) -> list[str]:
    """Return the snapshot URLs outside the run directory that its config.yaml records."""
    try:
        directory = open_storage(run)
        recorded = load_yaml(directory.read("config.yaml", limit=layout.MAX_CONFIG_CHARS))
        paths = [recorded["snapshot"].get("path"), recorded["snapshot"].get("fallback_path")]
        depth = (recorded["run"]["name"] or "").count("/") + 1  # sweep/job has 2 parts
    except Exception:  # not a run directory
        return []
    # A chained URL (a::b) could open a filesystem that executes what it reads, or writes;
    # snapshot.path is never one.
    paths = [path for path in paths if isinstance(path, str) and "::" not in path]
    # from the directory: it may be run.name with -2
    name = "/".join(directory.root.rstrip("/").split("/")[-depth:])
    return [f"{path.removesuffix('/')}/{name}" for path in paths]
