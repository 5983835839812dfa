"""Look at snapshots and change nothing: list and verify."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tqdm import tqdm

from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.errors import ConfigError, SnapshotError, printable
from mingpt_ddp.snapshots.format import CorruptSnapshotError, IncompleteSnapshotError, directory_name
from mingpt_ddp.snapshots.load import candidate_stores, step_in
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.storage import Storage, StorageError

DAMAGE = 1  # exit code
HEADINGS = ("step", "status", "size", "files", "world size", "train loss", "val loss", "best", "saved")


@dataclass(frozen=True)
class ListConfig:
    """What every command has."""

    url: str

    def __post_init__(self) -> None:
        if not self.url.strip():
            raise ConfigError("the URL is empty; name a run directory")
        refuse_credentials("URL", self.url)


def say(text: str) -> None:
    """Print what a stranger may have had a hand in."""
    print(printable(text), flush=True)


def found(url: str) -> list[tuple[SnapshotStore, list[int]]]:
    """The places below a URL that have snapshots, whole or not, with their steps.

    Raises:
        SnapshotError: there are none.
    """
    named = step_in(url)
    if named is not None:
        candidates = [(named[0], [named[1]] if named[1] in named[0].steps() else [])]
    else:
        candidates = [(store, store.steps()) for store in candidate_stores(url.rstrip("/") or url)]
    filled = [(store, steps) for store, steps in candidates if steps]
    if not filled:
        raise SnapshotError(f"there are no snapshots at {url}; name a run directory, its snapshots or one of them")
    return filled


# list


@dataclass(frozen=True)
class Entry:
    """One snapshot, as far as its manifest, its state and the sizes of its files tell."""

    step: int
    status: str  # whole | damaged | unfinished
    size: int  # bytes
    files: int
    position: dict[str, Any]  # where the run was


def list_(config: ListConfig) -> int:
    """Print a table for every place."""
    for store, steps in found(config.url):
        entries = [look(store, step) for step in steps]
        best = next((e.position.get("best_step") for e in reversed(entries) if e.status == "whole"), None)
        rows = [HEADINGS, *(_row(entry, best) for entry in entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        say("\n".join([store.url, *lines]))
    return 0


def look(store: SnapshotStore, step: int) -> Entry:
    """What can be said of a snapshot without reading its tensors.

    Raises:
        SnapshotError: it is of a newer format.
        StorageError: the storage does not answer.
    """
    try:
        files, state = store.read_metadata(step)
        position = state.get("position") if isinstance(state, dict) else None
        size = sum(file["bytes"] for file in files.values())
        return Entry(step, "whole", size, len(files) + 1, position if isinstance(position, dict) else {})
    except CorruptSnapshotError as damage:
        directory = Storage(f"{store.url}/{directory_name(step)}")
        sizes = [_size(directory, name) for name in directory.list()]
        status = "unfinished" if isinstance(damage, IncompleteSnapshotError) else "damaged"
        return Entry(step, status, sum(sizes), len(sizes), {})


def _size(directory: Storage, name: str) -> int:
    try:
        return directory.size(name) or 0
    except StorageError:
        raise
    except OSError:  # a link that leads nowhere
        return 0


def _row(entry: Entry, best: Any) -> tuple[str, ...]:
    position = entry.position
    return (
        *(str(entry.step), entry.status, human(entry.size), str(entry.files), _whole(position.get("world_size"))),
        *(_loss(position.get("train_loss")), _loss(position.get("val_loss"))),
        *("*" if entry.step == best else "", _time(position.get("saved_at"))),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _whole(value: Any) -> str:
    return str(int(value)) if _is_number(value) else "-"


def _loss(value: Any) -> str:
    return f"{value:.4f}" if _is_number(value) else "-"


def _time(value: Any) -> str:
    try:
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S") if _is_number(value) and value else "-"
    except (ValueError, OverflowError, OSError):  # no such year
        return "-"


def human(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# verify


def verify(config: ListConfig) -> int:
    """Read everything; a line for every snapshot."""
    damaged = 0
    for store, steps in found(config.url):
        for step in steps:
            problem = check(store, step)
            told = str(problem or "whole")
            if problem and not isinstance(problem, IncompleteSnapshotError):
                damaged += 1
                told = f"damaged: {told}"
            say(f"{store.url}/{directory_name(step)}: {told}")
    return DAMAGE if damaged else 0


def check(store: SnapshotStore, step: int) -> CorruptSnapshotError | None:
    """Read a snapshot; what is wrong with it, or None. Damage is remembered in the store."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    bar = tqdm(
        desc=f"step {step}",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        file=sys.stderr,
        disable=not shown,
        leave=False,
    )
    try:
        store.verify(step, bar.update)
        return None
    except CorruptSnapshotError as damage:
        store.damaged.add(step)
        return damage
    finally:
        bar.close()
