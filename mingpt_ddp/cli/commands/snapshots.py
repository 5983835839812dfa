"""List, verify, prune and export the snapshots of a run.

    python -m mingpt_ddp snapshots list   URL
    python -m mingpt_ddp snapshots verify URL
    python -m mingpt_ddp snapshots prune  URL keep_last=2 keep_best=true
    python -m mingpt_ddp snapshots export URL to=DIRECTORY step=best format=hf

url        path or fsspec URL of a run directory, of a directory of snapshots, or of one snapshot
list       show a table of the snapshots; this is fast, because it reads only manifests and file sizes
verify     read every byte and compare it with the manifests; the exit code is 1 if a snapshot is damaged
prune      delete snapshots. It keeps the newest ones (as many as keep_last says; damaged ones do not count), the one with the
           lowest validation loss (keep_best=true), and those whose step is a multiple of keep_every (if it is set)
export     write the weights, their description and a model card to a new local directory
step       snapshot to export: newest (the default), best (lowest validation loss) or the number of a step
format     safetensors (the default) writes model.safetensors and config.json; hf writes a directory that transformers loads,
           with the tokenizer
license    license that the model card names, such as apache-2.0; by default it names none
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
    """The key of the commands `list` and `verify`, as the usage above describes it."""

    url: str


@dataclass(frozen=True, kw_only=True)
class PruneConfig(ListConfig):
    """The keys of the command `prune`, as the usage above describes them."""

    keep_last: PositiveInt
    keep_best: bool = True
    keep_every: PositiveInt | None = None


def main() -> None:
    """Run `python -m mingpt_ddp snapshots`."""
    run_command(
        __doc__, {"list": list_snapshots, "verify": verify, "prune": prune, "export": export}
    )


@dataclass(frozen=True)
class SnapshotSummary:
    """One snapshot, described by its manifest, its state and its file sizes."""

    step: int
    status: str  # whole, damaged or unfinished
    size: int  # in bytes
    n_files: int
    train_state: dict[str, Any]  # train_state in state.json, not checked


def list_snapshots(config: ListConfig) -> int:
    """Print a table of the snapshots."""
    store, steps = find_steps(config.url)
    entries = [inspect(store, step) for step in steps]
    best = None  # step of the best snapshot, as the newest whole snapshot records it
    for entry in entries:
        if entry.status == "whole":
            best = entry.train_state.get("best_step")
    rows = [HEADINGS, *(_row(entry, best) for entry in entries)]
    echo("\n".join([store.url, *table_lines(rows)]))
    return 0


def inspect(store: SnapshotStore, step: int) -> SnapshotSummary:
    """Describe a snapshot without reading its tensors.

    Raises:
        SnapshotError: Another version of the package wrote the snapshot in another format.
        StorageError: The storage does not respond.
    """
    try:
        files, state = store.read_metadata(step)
    except CorruptSnapshotError as damage:
        status = "unfinished" if isinstance(damage, IncompleteSnapshotError) else "damaged"
        names = open_storage(f"{store.url}/{directory_name(step)}").list()
        size = sum(store.size(step, name) or 0 for name in names)
        return SnapshotSummary(step, status, size, len(names), {})
    size = sum(file["bytes"] for file in files.values())
    return SnapshotSummary(step, "whole", size, len(files) + 1, recorded_train_state(state))


def _row(entry: SnapshotSummary, best: Any) -> tuple[str, ...]:
    def cell(key: str, text: Callable[[Any], str]) -> str:
        value: Any = entry.train_state.get(key)
        # A file that is not ours may hold a number that cannot be shown, such as a time in the year
        # 100,000.
        with contextlib.suppress(ValueError, OverflowError, OSError):
            if type(value) in (int, float) and abs(value) < 1e15:
                return text(value)
        return "-"

    return (
        str(entry.step),
        entry.status,
        human_size(entry.size),
        str(entry.n_files),
        cell("world_size", "{:.0f}".format),
        cell("train_loss", "{:.4f}".format),
        cell("val_loss", "{:.4f}".format),
        "*" if entry.step == best else "",
        cell("saved_at", lambda time: str(datetime.fromtimestamp(int(time)))),
    )


def verify(config: ListConfig) -> int:
    """Print a line for each snapshot. Return the exit code 1 if any snapshot is damaged."""
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
    """Read every byte of a snapshot, with a progress bar on a terminal.

    Returns:
        The damage, or None if the snapshot is whole. The step of a damaged snapshot is added to
        `store.damaged`.
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


def prune(config: PruneConfig) -> int:
    """Delete old snapshots. Keep at least the newest whole snapshot."""
    if step_in(config.url) is not None:
        raise ConfigError(
            f"{config.url} is a single snapshot; give prune a run directory, or its directory of "
            "snapshots"
        )
    store, _ = find_steps(config.url)
    with _locked(store.storage):
        intact = (step for step in reversed(store.steps()) if verify_step(store, step) is None)
        whole = list(itertools.islice(intact, config.keep_last))
        if not whole:
            raise SnapshotError(
                f"there is no whole snapshot at {store.url}, so prune has deleted nothing; "
                "`snapshots verify` shows what is wrong with each snapshot"
            )
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
    """Hold the locks or the lease of the run that owns these snapshots, so that it cannot start.

    A local directory gets no lock if no run has ever locked it.

    Raises:
        RunError: The run is training and uses the snapshots.
        StorageUnavailableError: The storage does not respond.
    """
    with contextlib.ExitStack() as held:
        try:
            if storage.has_flock:
                path = Path(storage.root).resolve()
                for directory in (path, path.parent):  # the parent is the run directory
                    if (directory / LOCK).exists():
                        held.enter_context(acquire_lock(directory, wait_s=0))
            elif isinstance(storage, RemoteStorage) and storage.needs_lease:
                held.callback(Lease(storage).release)
        except LockedError as error:
            raise LockedError(error.location, error.owner, "wait until it ends") from error
        yield
