"""Look after snapshots by hand.

    python -m mingpt_ddp.snapshots list   URL
    python -m mingpt_ddp.snapshots verify URL
    python -m mingpt_ddp.snapshots prune  URL keep_last=2 keep_best=true
    python -m mingpt_ddp.snapshots export URL to=DIRECTORY step=1000

URL        a run directory, a directory of snapshots or one snapshot; a path or any fsspec URL
list       what is there, by manifests and sizes: quick
verify     read every byte; exit code 1 where one is not as it was written
prune      delete all but the last keep_last whole ones and, with keep_best, the one with the lowest validation loss
export     the weights as one model.safetensors beside a config.json in a new local directory; the newest, or step
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingpt_ddp import logs
from mingpt_ddp.errors import ConfigError, RunError, SnapshotError, UserError, printable
from mingpt_ddp.place import Place
from mingpt_ddp.sample import LONGEST_LINE, described, values_of
from mingpt_ddp.schema import build, closest, refuse_credentials
from mingpt_ddp.storage import Storage, StorageError, check_url, publish, sync_directory

if TYPE_CHECKING:
    from mingpt_ddp.snapshots.lease import Lease
    from mingpt_ddp.snapshots.store import Snapshot, SnapshotStore

USER_ERROR, DAMAGE = 2, 1  # exit codes
HEADINGS = ("step", "status", "size", "files", "world size", "train loss", "val loss", "best", "saved")


@dataclass(frozen=True)
class ListConfig:
    """What every command has."""

    url: str

    def __post_init__(self) -> None:
        if not self.url.strip():
            raise ConfigError("the URL is empty; name a run directory")
        refuse_credentials("URL", self.url)


@dataclass(frozen=True)
class PruneConfig(ListConfig):
    keep_last: int
    keep_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_last < 1:
            raise ConfigError(f"keep_last={self.keep_last} must be at least 1")


@dataclass(frozen=True)
class ExportConfig(ListConfig):
    to: str  # a local directory that does not exist yet
    step: int | None = None  # null: the newest

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to.strip() or "://" in self.to:
            raise ConfigError(f"to={self.to} must be a new local directory")


def main() -> None:
    """The entry point of `python -m mingpt_ddp.snapshots`."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return
    logs.to_console(Place())
    try:
        sys.exit(_command(words))
    except BrokenPipeError:  # the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        _leave(str(error))
    except OSError as error:
        _leave(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(message: str) -> None:
    print(printable(message)[:LONGEST_LINE], file=sys.stderr)
    sys.exit(USER_ERROR)


def _command(words: list[str]) -> int:
    """Do what the words ask for; the exit code.

    Raises:
        UserError: it cannot be done.
    """
    command, arguments = words[0], words[1:]
    if command not in COMMANDS:
        meant = closest(command, COMMANDS)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"{command} is not a command; {hint}")
    if not arguments:
        raise ConfigError(f"{command} needs a URL; name a run directory, its snapshots or one of them")
    shape, work = COMMANDS[command]
    config: Any = build(shape, {**values_of(arguments[1:], literal=("to",)), "url": arguments[0]}, "")
    check_url(config.url, "URL")
    return work(config)


def _say(text: str) -> None:
    """Print what a stranger may have had a hand in."""
    print(printable(text), flush=True)


def _found(url: str) -> list[tuple[SnapshotStore, list[int]]]:
    """The places below a URL that have snapshots, whole or not, with their steps.

    Raises:
        SnapshotError: there are none.
    """
    from mingpt_ddp.snapshots.store import places, step_in

    named = step_in(url)
    if named is not None:
        candidates = [(named[0], [named[1]] if named[1] in named[0].steps() else [])]
    else:
        candidates = [(store, store.steps()) for store in places(url.rstrip("/") or url)]
    found = [(store, steps) for store, steps in candidates if steps]
    if not found:
        raise SnapshotError(f"there are no snapshots at {url}; name a run directory, its snapshots or one of them")
    return found


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
    for store, steps in _found(config.url):
        entries = [look(store, step) for step in steps]
        best = next((e.position.get("best_step") for e in reversed(entries) if e.status == "whole"), None)
        rows = [HEADINGS, *(_row(entry, best) for entry in entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        _say("\n".join([store.url, *lines]))
    return 0


def look(store: SnapshotStore, step: int) -> Entry:
    """What can be said of a snapshot without reading its tensors.

    Raises:
        SnapshotError: it is of a newer format.
        StorageError: the storage does not answer.
    """
    from mingpt_ddp.snapshots.store import Damaged, directory_name

    try:
        files, state = store.glance(step)
        position = state.get("position") if isinstance(state, dict) else None
        size = sum(file["bytes"] for file in files.values())
        return Entry(step, "whole", size, len(files) + 1, position if isinstance(position, dict) else {})
    except Damaged:
        directory = Storage(f"{store.url}/{directory_name(step)}")
        sizes = [_size(directory, name) for name in directory.list()]
        return Entry(step, "damaged" if store.is_committed(step) else "unfinished", sum(sizes), len(sizes), {})


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
    from mingpt_ddp.snapshots.store import directory_name

    damaged = 0
    for store, steps in _found(config.url):
        for step in steps:
            problem = check(store, step)
            if problem and store.is_committed(step):
                damaged += 1
                problem = f"damaged: {problem}"
            _say(f"{store.url}/{directory_name(step)}: {problem or 'whole'}")
    return DAMAGE if damaged else 0


def check(store: SnapshotStore, step: int) -> str | None:
    """Read a snapshot; what is wrong with it, or None. Damage is remembered in the store."""
    from tqdm import tqdm

    from mingpt_ddp.snapshots.store import Damaged

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
    except Damaged as damage:
        store.damaged.add(step)
        return str(damage)
    finally:
        bar.close()


# prune


def prune(config: PruneConfig) -> int:
    """Say what goes, then delete it; in every place the newest whole one stays, whatever the words say."""
    from mingpt_ddp.snapshots.store import directory_name, step_in

    if step_in(config.url) is not None:
        raise ConfigError(f"{config.url} is one snapshot; prune takes a run directory or its snapshots")
    found = _found(config.url)
    with _owned(config.url, [store for store, _ in found]):
        for store, _ in found:
            whole = _newest_whole(store, config.keep_last)
            if not whole:
                raise SnapshotError(f"there is no whole snapshot at {store.url}, so that nothing is deleted")
            best = look(store, whole[0]).position.get("best_step") if config.keep_best else None
            best = best if isinstance(best, int) else None
            gone = store.surplus(config.keep_last, best, whole[0])
            for step in gone:
                _say(f"deleting {store.url}/{directory_name(step)}")
            store.prune(config.keep_last, best, whole[0])
            _say(f"{store.url}: {len(gone)} deleted, {len(store.steps())} kept")
    return 0


def _newest_whole(store: SnapshotStore, count: int) -> list[int]:
    """The newest `count` snapshots in which every byte is right: for a damaged one no other may have to go."""
    whole: list[int] = []
    for step in reversed(store.steps()):
        if len(whole) < count and store.is_committed(step) and check(store, step) is None:
            whole.append(step)
    return whole


@contextmanager
def _owned(url: str, stores: list[SnapshotStore]) -> Iterator[None]:
    """Own the places as a run would, so that none can be using them.

    Raises:
        RunError: a run is.
    """
    from mingpt_ddp.rundir import RunDirectory

    locked: dict[Path, RunDirectory] = {}
    leases: list[Lease] = []  # where the URL says nothing of the run

    def lock(path: Path) -> None:
        path = path.resolve()
        if path not in locked:
            locked[path] = RunDirectory(path, wait_s=0)

    try:
        run = Storage(url)
        if run.local and (Path(run.root) / "config.yaml").exists():
            lock(Path(run.root))
        for store in stores:
            place = Path(store.storage.root)
            if store.storage.shared and locked:
                next(iter(locked.values())).own_snapshots(store.storage)
            elif store.storage.shared:
                leases.append(_lease(store.storage))
            elif store.storage.local:
                lock(place.parent if (place.parent / ".lock").exists() and place.name == "snapshots" else place)
        yield
    except RunError as error:
        raise RunError(error.args[0].replace(", or choose another run.name", "")) from error
    finally:
        for owner in locked.values():
            owner.release()
        for lease in leases:
            lease.release()


def _lease(place: Storage) -> Lease:
    from mingpt_ddp.snapshots.lease import Lease

    try:
        return Lease(place)
    except OSError as error:
        raise RunError(f"cannot use {place.url}: {error}") from error


# export


def export(config: ExportConfig) -> int:
    """Write the weights of one snapshot, joined, to a directory that appears whole or not at all."""
    from mingpt_ddp.snapshots.image import encode

    target = Path(config.to)
    if os.path.lexists(target):
        raise ConfigError(f"to={config.to} is there already; name a new directory")
    found = _chosen(config)
    files: dict[str, bytes | memoryview] = {"model.safetensors": encode(found.model), "config.json": description(found)}
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, content in files.items():
            publish(partial / name, content)
        os.rename(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"cannot write to {config.to}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _say(f"step {found.step} is in {target}: {', '.join(files)}")
    return 0


def _chosen(config: ExportConfig) -> Snapshot:
    """The snapshot to export, its model alone.

    Raises:
        SnapshotError: it is not there, or not whole.
    """
    from mingpt_ddp.snapshots.store import Damaged, directory_name, load

    if config.step is None:
        return load(config.url, kinds=("model",))
    for store, steps in _found(config.url):
        if config.step in steps:
            try:
                return store.read(config.step, kinds=("model",))
            except Damaged as damage:
                name = f"{store.url}/{directory_name(config.step)}"
                raise SnapshotError(f"{name} cannot be used: {damage}") from damage
    raise SnapshotError(f"there is no snapshot of step {config.step} at {config.url}")


def description(found: Snapshot) -> bytes:
    """What a program needs to use the weights, as JSON: the shape of the model, and which token is which character.

    Raises:
        SnapshotError: the state does not hold it.
    """
    trained, characters = described(found.state)
    position = found.state.get("position")
    values = {
        "step": found.step,
        "val_loss": position.get("val_loss") if isinstance(position, dict) else None,  # nats per character
        "model": trained.to_dict()["model"],
        "block_size": trained.data.block_size,
        "vocabulary": characters,
    }
    return (json.dumps(values, indent=1) + "\n").encode()


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "list": (ListConfig, list_),
    "verify": (ListConfig, verify),
    "prune": (PruneConfig, prune),
    "export": (ExportConfig, export),
}

if __name__ == "__main__":
    main()
