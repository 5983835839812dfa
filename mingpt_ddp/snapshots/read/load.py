"""Find snapshots by the URL of a run directory, of a directory of snapshots, or of one snapshot."""

import contextlib
import itertools
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
from mingpt_ddp.storage.remote.remote_errors import redact
from mingpt_ddp.storage.urls import check_can_open, open_storage
from mingpt_ddp.storage.yaml_and_json import MAX_YAML_BYTES, load_yaml

log = logging.getLogger(__name__)

Step: TypeAlias = int | Literal["newest", "best"]  # best: with the lowest validation loss
ADVICE = "name a run directory, its snapshots or one of them"
ANSWER_TIMEOUT_S = 10.0  # for a store to list its snapshots for a command


def candidate_urls(url: str, follow: bool = True) -> Iterator[str]:
    """Yield the URLs that may hold the snapshots of a run directory or of a directory of snapshots.

    Args:
        follow: include those elsewhere: by a symbolic link, and by the configuration of the run's
            last start.
    """
    snapshots = f"{url}/snapshots"
    if follow or not _is_link(snapshots):
        yield snapshots
    yield url
    if follow and (recorded := _recorded_url(url)):
        yield recorded


def _open_store(url: str) -> SnapshotStore:
    try:
        check_can_open("URL", url)
    except ConfigError as error:  # recorded on another machine
        raise SnapshotError(f"cannot list snapshots: {error.args[0]}") from error
    return SnapshotStore(url)


def refuse_other_location(store: SnapshotStore, directory: Path) -> None:
    """Refuse to start a run from the beginning while the store of its last start has snapshots.

    Args:
        store: The store of the run, which has no snapshots.

    Raises:
        SnapshotError: The other store has snapshots, or cannot be read. The error names it.
    """
    for url in candidate_urls(str(directory)):
        if url in (store.url, str(directory)):
            continue
        other = _open_store(url)
        if any(map(other.is_committed, other.steps())):
            where = redact(url)
            raise SnapshotError(
                f"the run has snapshots at {where}, but none at {redact(store.url)}; add "
                f"run.resume={where} to go on from there, or choose another run.name"
            )


def step_in(url: str) -> tuple[SnapshotStore, int] | None:
    """Return the store and the step if the URL names one snapshot."""
    parent, _, last = url.rstrip("/").rpartition("/")
    step = layout.step_of(last)
    if step is None:
        return None
    return SnapshotStore(parent or "."), step


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
    url = url.rstrip("/") or url
    locations: Iterable[str] = candidate_urls(url, follow)  # lazily: a silent server ends it
    if named:
        parent, only = named
        locations = [parent.url]
    steps_by_store = list[tuple[SnapshotStore, list[int]]]()

    def list_steps(store: SnapshotStore) -> None:
        store.storage.set_deadline(ANSWER_TIMEOUT_S)
        steps = store.steps()
        if named:
            steps = [step for step in steps if step == only]
        if steps:
            steps_by_store.append((store, steps))
        store.storage.set_deadline(math.inf)

    errors = _ask_each(locations, url, list_steps)
    _raise_or_log(errors, bool(steps_by_store) and not strict)
    elsewhere = list[str]()
    if not (named or follow):
        looked_at = {*candidate_urls(url, follow=False)}  # which reads nothing
        elsewhere = [each for each in candidate_urls(url) if each not in looked_at]
    where = redact(", ".join(elsewhere))
    hint = f"the run also has some at {where}; add follow=true to include them"
    if not steps_by_store:
        raise SnapshotError(
            f"there are no snapshots at {url}{_if_missing(url)}; {hint if elsewhere else ADVICE}"
        )
    if elsewhere:
        log.warning("%s: %s", url, hint)
    return steps_by_store


def load(
    url: str, kinds: Sequence[str] = layout.KINDS, step: Step = "newest", whole: bool = True
) -> Snapshot:
    """Read a snapshot of a run directory or a directory of snapshots, or the one at the URL.

    Args:
        kinds: which tensors to read; the others are left empty.
        step: which one; `newest` skips damaged snapshots.
        whole: see SnapshotStore.read.

    Raises:
        SnapshotError: there is no such snapshot, or it is damaged.
    """
    url = url.rstrip("/") or url
    if step != "newest":
        number, stores = _find_stores(url, step)
        return _read_first(stores, number, kinds, whole)
    if named := step_in(url):
        store, number = named
        return _read_first([store], number, kinds, whole)
    return _read_newest(url, kinds, whole)


def _read_newest(url: str, kinds: Sequence[str], whole: bool) -> Snapshot:
    """Read the newest undamaged snapshot of the stores at a URL.

    Raises:
        SnapshotError: there is none.
    """
    newest_of_all: Snapshot | None = None

    def read_newer(store: SnapshotStore) -> None:
        nonlocal newest_of_all
        if newest_of_all is None or max(store.steps(), default=0) > newest_of_all.step:
            newest = store.read_latest(kinds, whole)
            if newest is not None and (newest_of_all is None or newest.step > newest_of_all.step):
                newest_of_all = newest

    errors = _ask_each(candidate_urls(url), url, read_newer)
    _raise_or_log(errors, newest_of_all is not None)
    if newest_of_all is None:
        raise SnapshotError(f"there is no whole snapshot at {url}{_if_missing(url)}; {ADVICE}")
    return newest_of_all


def _if_missing(url: str) -> str:
    storage = open_storage(url)
    if storage.local and not os.path.lexists(storage.root):
        return ", which does not exist"
    return ""


def _ask_each(
    locations: Iterable[str], url: str, ask: Callable[[SnapshotStore], None]
) -> list[UserError]:
    """Call `ask` for the store at each location; return the errors of those that cannot be read.

    Skip `url` itself if its server has not responded for a subdirectory.
    """
    errors: list[UserError] = []
    for location in locations:
        no_answer = any(isinstance(error, StorageUnavailableError) for error in errors)
        if location == url and no_answer:
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


def _read_first(
    stores: Iterable[SnapshotStore], step: int, kinds: Sequence[str], whole: bool
) -> Snapshot:
    """Read the snapshot of a step from the first store that has it undamaged.

    Raises:
        SnapshotError: names the first store, and its damage.
    """
    errors = list[SnapshotError]()
    for store in stores:
        try:
            snapshot = store.read(step, kinds, whole)
        except CorruptSnapshotError as damage:
            url = f"{store.url}/{layout.directory_name(step)}"
            error = SnapshotError(f"{url} cannot be used: {damage}")
            error.__cause__ = damage
            errors.append(error)
            continue
        for error in errors:
            log.warning("%s", error)
        return snapshot
    raise errors[0]


def _find_stores(url: str, step: int | str) -> tuple[int, list[SnapshotStore]]:
    """Return a step, or the best one by the newest readable state, and the stores that list it.

    Raises:
        SnapshotError: there is none.
        StorageUnavailableError: no store that responds has snapshots.
    """
    listed: list[tuple[int, SnapshotStore]] = []
    for store, steps in find_steps(url, strict=False):
        listed.extend((number, store) for number in steps)
    listed.sort(key=lambda pair: pair[0], reverse=True)
    wanted: Any = _best_step(listed) if step == "best" else step
    stores = [store for number, store in listed if number == wanted]
    if not stores:
        newest, _ = listed[0]
        raise SnapshotError(
            f"there is no snapshot of step {wanted} at {url}; the newest is of step {newest}"
        )
    return wanted, stores


def _best_step(listed: list[tuple[int, SnapshotStore]]) -> Any:
    """Return the best step that the newest readable state records; "best" if there is none.

    Args:
        listed: steps and their stores, the newest first.
    """
    for number, store in listed:
        with contextlib.suppress(CorruptSnapshotError):
            _, state = store.read_metadata(number)
            best = recorded_train_state(state).get("best_step")
            return best if type(best) is int else "best"
    return "best"


def recorded_train_state(state: Any) -> dict[str, Any]:
    """Return the train state in a state.json, unchecked; {} if it has none."""
    train_state = state.get("train_state") if isinstance(state, dict) else None
    return train_state if isinstance(train_state, dict) else {}


def _is_link(url: str) -> bool:
    storage = open_storage(url)
    return storage.local and os.path.islink(storage.root)


def _recorded_url(run: str) -> str | None:
    """Return the URL of the snapshots outside a run directory that its last start recorded."""
    recorded = None
    with contextlib.suppress(Exception):  # not a run directory, or there are no more
        directory = open_storage(run)
        for number in itertools.count(1):
            name = "config.yaml" if number == 1 else f"config.{number}.yaml"
            content = directory.read(name, limit=MAX_YAML_BYTES + 1)
            with contextlib.suppress(Exception):  # not of a run
                recorded = _url_in(load_yaml(content), directory.root)
    return recorded


def _url_in(config: Any, directory: str) -> str | None:
    """Return the URL of the snapshots outside the run directory in its configuration."""
    path = config["snapshot"].get("path")
    # A chained URL (a::b) could open a filesystem that executes what it reads, or writes;
    # snapshot.path is never one.
    if not isinstance(path, str) or "::" in path:
        return None
    depth = (config["run"]["name"] or "").count("/") + 1  # sweep/job has 2 parts
    # from the directory: it may be run.name with -2
    name = "/".join(directory.rstrip("/").split("/")[-depth:])
    return f"{path.removesuffix('/')}/{name}"
