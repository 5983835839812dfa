"""Change what is there, or take a copy: prune and export."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mingpt_ddp.cli.sample import described, typed
from mingpt_ddp.cli.snapshots_survey import ListConfig, check, found, look, say
from mingpt_ddp.config.schema import MODELS
from mingpt_ddp.errors import ConfigError, RunError, SnapshotError
from mingpt_ddp.snapshots.buffer import encode
from mingpt_ddp.snapshots.format import MODEL, Snapshot, directory_name
from mingpt_ddp.snapshots.load import load, step_in
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.run_dir import RunDirectory
from mingpt_ddp.storage.storage import Storage, atomic_write, sync_directory


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


# prune


def prune(config: PruneConfig) -> int:
    """Say what goes, then delete it; in every place the newest whole one stays, whatever the words say."""
    if step_in(config.url) is not None:
        raise ConfigError(f"{config.url} is one snapshot; prune takes a run directory or its snapshots")
    places = found(config.url)
    with _owned(config.url, [store for store, _ in places]):
        for store, _ in places:
            whole = _newest_whole(store, config.keep_last)
            if not whole:
                raise SnapshotError(f"there is no whole snapshot at {store.url}, so that nothing is deleted")
            best = look(store, whole[0]).position.get("best_step") if config.keep_best else None
            best = best if isinstance(best, int) else None
            gone = store.expired_steps(config.keep_last, best, whole[0])
            for step in gone:
                say(f"deleting {store.url}/{directory_name(step)}")
            store.prune(config.keep_last, best, whole[0])
            say(f"{store.url}: {len(gone)} deleted, {len(store.steps())} kept")
    return 0


def _newest_whole(store: SnapshotStore, count: int) -> list[int]:
    """The newest `count` snapshots in which every byte is right: for a damaged one no other may have to go."""
    whole: list[int] = []
    for step in reversed(store.steps()):
        if len(whole) < count and check(store, step) is None:
            whole.append(step)
    return whole


@contextmanager
def _owned(url: str, stores: list[SnapshotStore]) -> Iterator[None]:
    """Own the places as a run would, so that none can be using them.

    Raises:
        RunError: a run is.
        StorageUnavailableError: one of the places does not answer.
    """
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
                next(iter(locked.values())).lock_snapshots(store.storage)
            elif store.storage.shared:
                leases.append(Lease(store.storage))
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


# export


def export(config: ExportConfig) -> int:
    """Write the weights of one snapshot, joined, to a directory that appears whole or not at all."""
    target = Path(config.to)
    if os.path.lexists(target):
        raise ConfigError(f"to={config.to} is there already; name a new directory")
    chosen = _chosen(config)
    files: dict[str, bytes | memoryview] = {
        MODEL: encode(chosen.model),
        "config.json": description(chosen),
    }
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, content in files.items():
            atomic_write(partial / name, content)
        os.rename(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"cannot write to {config.to}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"step {chosen.step} is in {target}: {', '.join(files)}")
    return 0


def _chosen(config: ExportConfig) -> Snapshot:
    """The snapshot to export, its model alone.

    Raises:
        SnapshotError: it is not there, or not whole.
    """
    if config.step is None:
        return load(config.url, kinds=("model",))
    for store, steps in found(config.url):
        if config.step in steps:
            return load(f"{store.url}/{directory_name(config.step)}", kinds=("model",))
    raise SnapshotError(f"there is no snapshot of step {config.step} at {config.url}")


def description(found: Snapshot) -> bytes:
    """What a program needs to use the weights, as JSON: the shape of the model, and which token is which character.

    Raises:
        SnapshotError: the state does not hold it.
    """
    trained = described(found.state)
    position = found.state.get("position")
    if trained.architecture in MODELS:  # what a user has registered is copied as it is: this tool runs no code
        typed(trained)
    values = {
        "step": found.step,
        "val_loss": position.get("val_loss") if isinstance(position, dict) else None,  # nats per character
        "model": trained.model,
        "block_size": trained.block_size,
        "vocabulary": trained.vocabulary,
    }
    return (json.dumps(values, indent=1) + "\n").encode()
