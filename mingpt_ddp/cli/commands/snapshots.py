"""List, verify, prune and export the snapshots of a run.

    python -m mingpt_ddp snapshots list   URL
    python -m mingpt_ddp snapshots verify URL
    python -m mingpt_ddp snapshots prune  URL keep_last=2 keep_best=true
    python -m mingpt_ddp snapshots export URL to=DIRECTORY step=best format=hf

url        a run directory, a directory of snapshots or one snapshot; a path or any fsspec URL
list       show a table; fast, since it reads manifests and file sizes only
verify     read every byte and compare it with the manifest; exit code 1 if a snapshot is damaged
prune      delete all but the last keep_last whole ones and, with keep_best, the one with the lowest validation loss;
           also keep those of every keep_every steps, if it is given
export     write the weights, their description and a model card to a new local directory
step       which one to export: newest (the default), best (lowest validation loss) or a number
format     safetensors (the default): model.safetensors and config.json; hf: a directory that transformers loads,
           tokenizer included
license    of the export, for its model card, as in apache-2.0; by default the card names none
"""  # noqa: E501

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mingpt_ddp.cli.arguments import human_size, run_command
from mingpt_ddp.cli.commands.export import export
from mingpt_ddp.config.keys.fields import PositiveInt
from mingpt_ddp.errors import ConfigError, SnapshotError
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.snapshots.format import (
    CorruptSnapshotError,
    IncompleteSnapshotError,
    directory_name,
)
from mingpt_ddp.snapshots.read.load import find_steps, recorded_train_state, step_in
from mingpt_ddp.snapshots.write.retention import expired_steps
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.lease import Lease, LockedError
from mingpt_ddp.storage.lock import LOCK, acquire_lock
from mingpt_ddp.storage.remote.remote import RemoteStorage
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.storage.urls import open_storage

HEADINGS = (
    "step",
    "status",
    "size",
    "files",
    "world size",
    "train loss",
    "val loss",
    "best",
    "saved",
)


@dataclass(frozen=True)
class ListConfig:
    url: str


@dataclass(frozen=True, kw_only=True)
class PruneConfig(ListConfig):
    keep_last: PositiveInt
    keep_best: bool = True
    keep_every: PositiveInt | None = None


def main() -> None:
    """Run `python -m mingpt_ddp snapshots`."""
    run_command(
        __doc__, {"list": list_snapshots, "verify": verify, "prune": prune, "export": export}
    )


# list


@dataclass(frozen=True)
class Listing:
    """One snapshot, described by its manifest, its state and its file sizes."""

    step: int
    status: str  # whole | damaged | unfinished
    size: int  # bytes
    files: int
    train_state: dict[str, Any]  # from state.json, unchecked


def list_snapshots(config: ListConfig) -> int:
    """Print a table of the snapshots."""
    store, steps = find_steps(config.url)
    entries = [inspect(store, step) for step in steps]
    best = None  # as the newest whole snapshot has it
    for entry in entries:
        if entry.status == "whole":
            best = entry.train_state.get("best_step")
    rows = [HEADINGS, *(_row(entry, best) for entry in entries)]
    echo("\n".join([store.url, *table_lines(rows)]))
    return 0


def inspect(store: SnapshotStore, step: int) -> Listing:
    """Describe a snapshot without reading its tensors.

    Raises:
        SnapshotError: another version wrote it in another format.
        StorageError: the storage does not respond.
    """
    try:
        files, state = store.read_metadata(step)
    except CorruptSnapshotError as damage:
        status = "unfinished" if isinstance(damage, IncompleteSnapshotError) else "damaged"
        names = open_storage(f"{store.url}/{directory_name(step)}").list()
        size = sum(store.size(step, name) or 0 for name in names)
        return Listing(step, status, size, len(names), {})
    size = sum(file["bytes"] for file in files.values())
    return Listing(step, "whole", size, len(files) + 1, recorded_train_state(state))


def _row(entry: Listing, best: Any) -> tuple[str, ...]:
    def cell(key: str, text: Callable[[Any], str]) -> str:
        value: Any = entry.train_state.get(key)
        with contextlib.suppress(ValueError, OverflowError, OSError):  # a year beyond datetime
            if type(value) in (int, float) and abs(value) < 1e15:
                return text(value)
        return "-"

    return (
        str(entry.step),
        entry.status,
        human_size(entry.size),
        str(entry.files),
        cell("world_size", "{:.0f}".format),
        cell("train_loss", "{:.4f}".format),
        cell("val_loss", "{:.4f}".format),
        "*" if entry.step == best else "",
        cell("saved_at", lambda time: str(datetime.fromtimestamp(int(time)))),
    )


# verify


def verify(config: ListConfig) -> int:
    """Print a line for each snapshot; the exit code is 1 if one is damaged."""
    damaged = False
    store, steps = find_steps(config.url)
    for step in steps:
        problem = verify_step(store, step)
        verdict = str(problem or "whole")
        if problem is not None and not isinstance(problem, IncompleteSnapshotError):
            verdict = f"damaged: {problem}"
            damaged = True
        echo(f"{store.url}/{directory_name(step)}: {verdict}")
    return int(damaged)


def verify_step(store: SnapshotStore, step: int) -> CorruptSnapshotError | None:
    """Read a whole snapshot, with a progress bar on a terminal.

    Return its damage, noted in `store.damaged`.
    """
    with tqdm(
        desc=f"step {step}", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None
    ) as bar:
        try:
            store.verify(step, bar.update)
            return None
        except CorruptSnapshotError as damage:
            store.damaged.add(step)
            return damage


# prune


def prune(config: PruneConfig) -> int:
    """Delete old snapshots; keep at least the newest whole one."""
    if step_in(config.url) is not None:
        raise ConfigError(
            f"{config.url} is one snapshot; prune takes a run directory or its snapshots"
        )
    store, _ = find_steps(config.url)
    with _locked(store.storage):
        intact = (step for step in reversed(store.steps()) if verify_step(store, step) is None)
        whole = list(itertools.islice(intact, config.keep_last))  # every byte verified
        if not whole:
            raise SnapshotError(f"there is no whole snapshot at {store.url}; nothing is deleted")
        newest = whole[0]
        best = None
        if config.keep_best:
            recorded = inspect(store, newest).train_state.get("best_step")
            best = recorded if isinstance(recorded, int) else None
        expired = expired_steps(store, config.keep_last, best, newest, config.keep_every)
        for step in expired:
            echo(f"deleting {store.url}/{directory_name(step)}")
            store.clear(step)
        echo(f"{store.url}: {len(expired)} deleted, {len(store.steps())} kept")
    return 0


@contextlib.contextmanager
def _locked(storage: Storage) -> Iterator[None]:
    """Hold the locks or the lease of the run whose snapshots these are, so that it cannot run.

    A local directory that no run has locked so far gets no lock.

    Raises:
        RunError: The run is using them.
        StorageUnavailableError: The storage does not respond.
    """
    with contextlib.ExitStack() as held:
        try:
            if storage.has_flock:
                path = Path(storage.root).resolve()
                for directory in (path, path.parent):  # the parent is the run directory
                    if (directory / LOCK).exists():
                        held.enter_context(acquire_lock(directory, wait_s=0))
            elif isinstance(storage, RemoteStorage) and storage.has_lease:
                held.callback(Lease(storage).release)
        except LockedError as error:
            raise LockedError(error.location, error.owner, "wait for it") from error
        yield
