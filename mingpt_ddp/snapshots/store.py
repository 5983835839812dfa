"""The state of a run on disk or in an object store, in a form that a kill at any moment leaves whole.

A snapshot is a directory `step_00001000` with model.safetensors, optimizer.safetensors, state.json and, written last,
manifest.json with the size and SHA-256 of the others. Where several ranks write, the tensors are divided over files
model-00001-of-00002.safetensors and so on. Without a manifest that fits, it does not exist. Nothing in it can run code:
tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml
from torch import Tensor

from mingpt_ddp.errors import SnapshotError
from mingpt_ddp.snapshots.image import decode, encode
from mingpt_ddp.snapshots.lease import Lease
from mingpt_ddp.storage import Storage, StorageError

log = logging.getLogger(__name__)

Files: TypeAlias = dict[str, dict[str, Any]]  # name -> {"bytes": size, "sha256": digest}

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
KINDS = ("model", "optimizer")
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SMALL = 1 << 24  # bytes: no JSON of ours is larger
SMALLEST_PART = 1 << 24  # bytes: dividing less than this costs more in files than it gains
PARALLEL = 4  # files written to or read from an object store at the same time


class Damaged(Exception):
    """This snapshot is not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """The content of one snapshot, all of it on the CPU."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # `<parameter>:<name>`, see tensors.py
    state: dict[str, Any]  # plain values: configuration, position, scaler, losses, vocabulary


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_([0-9]{8,18})", name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def part_name(kind: str, part: int, parts: int) -> str:
    """The file of one part of the tensors; parts count from 0, in the name from 1."""
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part + 1:05d}-of-{parts:05d}.safetensors"


def divide(tensors: Mapping[str, Mapping[str, Tensor]], writers: int) -> list[dict[str, dict[str, Tensor]]]:
    """The files of each writer, as equal in bytes as whole tensors can be; the same on every rank.

    Args:
        tensors: by kind and name.
    """
    everything = [(tensor.nbytes, kind, name) for kind, named in tensors.items() for name, tensor in named.items()]
    parts = max(1, min(writers, sum(size for size, _, _ in everything) // SMALLEST_PART))
    loads = [0] * parts
    files: list[dict[str, dict[str, Tensor]]] = [{part_name(k, i, parts): {} for k in tensors} for i in range(parts)]
    for size, kind, name in sorted(everything, reverse=True):  # the largest first, each to whom has least
        part = loads.index(min(loads))
        loads[part] += size
        files[part][part_name(kind, part, parts)][name] = tensors[kind][name]
    return files


def manifest_of(step: int, files: Files) -> bytes:
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1).encode()


class SnapshotStore:
    """The snapshots of one run below one URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.storage = Storage(url)
        self.damaged: set[int] = set()  # steps that turned out to be
        self.lease: Lease | None = None  # where no lock of the file system says whose they are

    def steps(self) -> list[int]:
        """The steps that have a directory, whole or not, in ascending order.

        Raises:
            SnapshotError: the place cannot be read.
        """
        try:
            names = self.storage.list()
        except Exception as error:  # every protocol fails in its own way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SnapshotError(f"cannot look for snapshots at {self.url}: {reason[:300]}") from error
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def is_committed(self, step: int) -> bool:
        return self.storage.size(f"{directory_name(step)}/{MANIFEST}") is not None

    # Writing, in three stages, of which several ranks may share the second.

    def clear(self, step: int) -> None:
        """Remove what an earlier attempt left of this step."""
        self.damaged.discard(step)
        self._remove(step)

    def put(self, step: int, contents: Mapping[str, memoryview | bytes]) -> Files:
        """Write some of the files; what the manifest has to say of them."""

        def put_one(name: str) -> dict[str, Any]:
            digest = hashlib.sha256(contents[name]).hexdigest()
            self.storage.write(f"{directory_name(step)}/{name}", contents[name])
            return {"bytes": len(contents[name]), "sha256": digest}

        with self._pool() as pool:
            return dict(zip(contents, pool.map(put_one, contents), strict=True))

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(PARALLEL if self.storage.shared else 1)

    def commit(self, step: int, files: Files) -> None:
        """From now on the snapshot exists.

        Raises:
            RunError: another process has taken the place over.
        """
        for name, file in files.items():
            if self.storage.size(f"{directory_name(step)}/{name}") != file["bytes"]:
                raise OSError(f"{name} is not there as it was written")
        if self.lease is not None:
            self.lease.check()
        self.storage.write(f"{directory_name(step)}/{MANIFEST}", manifest_of(step, files))

    def write(self, snapshot: Snapshot) -> None:
        """Commit a snapshot that is at hand as a whole."""
        self.clear(snapshot.step)
        state = json.dumps(snapshot.state, indent=1).encode()
        contents: dict[str, memoryview | bytes] = {
            MODEL: encode(snapshot.model),
            OPTIMIZER: encode(snapshot.optimizer),
            STATE: state,
        }
        self.commit(snapshot.step, self.put(snapshot.step, contents))

    def _remove(self, step: int) -> None:
        """The manifest goes first, so that a snapshot which is deleted half-way does not exist."""
        self.storage.delete(f"{directory_name(step)}/{MANIFEST}")
        self.storage.delete(directory_name(step))

    # Reading.

    def read(self, step: int) -> Snapshot:
        """A snapshot, every byte checked against the manifest.

        Raises:
            Damaged: it is not whole.
            SnapshotError: the storage does not answer, or the snapshot is of a newer format.
        """
        try:
            files = self.files(step)
            with self._pool() as pool:
                read = pool.map(lambda name: self._verified(step, name, files[name]), files)
                contents = dict(zip(files, read, strict=True))
        except StorageError as error:  # that says nothing about the snapshot
            raise SnapshotError(f"cannot read the snapshot of step {step}: {error}") from error
        try:
            model, optimizer = (
                {k: t for name in files if name.startswith(kind) for k, t in decode(contents[name]).items()}
                for kind in KINDS
            )
            return Snapshot(step, model, optimizer, json.loads(contents[STATE]))
        except (ValueError, RecursionError) as error:  # the bytes are those of the manifest, but nothing that we wrote
            raise Damaged(f"cannot be parsed: {error}") from error

    def files(self, step: int) -> Files:
        """What the manifest lists.

        Raises:
            Damaged: it is missing, or not as we write it.
        """
        try:
            content = self.storage.read(f"{directory_name(step)}/{MANIFEST}", limit=SMALL)
            manifest = json.loads(content)
            files: Files = manifest["files"]
            version = manifest["format"]
            sound = manifest["step"] == step and version == FORMAT and manifest_of(step, files) == content
            sound &= all(isinstance(f["bytes"], int) and isinstance(f["sha256"], str) for f in files.values())
        except FileNotFoundError as error:
            raise Damaged("it was never finished") from error
        except StorageError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} is damaged") from error
        if isinstance(version, int) and version > FORMAT:
            raise SnapshotError(f"{self.url} has snapshots of format {version}, written by a newer version; upgrade")
        if not sound or not _is_complete(files):
            raise Damaged(f"{MANIFEST} does not describe step {step} in format {FORMAT}")
        if sum(file["bytes"] for file in files.values()) > _physical_memory():
            raise Damaged("it is larger than the memory of this machine")
        return files

    def _verified(self, step: int, name: str, expected: dict[str, Any]) -> bytes:
        path = f"{directory_name(step)}/{name}"
        if self.storage.size(path) != expected["bytes"]:
            raise Damaged(f"{name} is missing or has another size")
        try:
            content = self.storage.read(path)
        except StorageError:
            raise
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise Damaged(f"{name} has other content than was written")
        return content

    def newest(self) -> Snapshot | None:
        """The newest whole snapshot; each damaged one that is newer is reported in one line.

        Raises:
            SnapshotError: all that were committed are damaged, or the storage does not answer.
        """
        for step in reversed(self.steps()):
            try:
                if self.is_committed(step):
                    return self.read(step)
                log.info("%s/%s was never finished and is ignored", self.url, directory_name(step))
            except Damaged as damage:
                self.damaged.add(step)
                log.warning("damaged snapshot %s/%s is ignored: %s", self.url, directory_name(step), damage)
            except StorageError as error:
                raise SnapshotError(f"cannot read the snapshot of step {step}: {error}") from error
        if self.damaged:
            raise SnapshotError(f"all snapshots at {self.url} are damaged; move them away, or use run.resume=never")
        return None

    def prune(self, keep_last: int, best: int | None, newest: int) -> list[int]:
        """Delete all but the last `keep_last` committed snapshots up to `newest` and the `best` one; which went.

        Directories beyond `newest` belong to a future that this run left behind by resuming from an older snapshot;
        they stay until it writes them anew.
        """
        past = [step for step in self.steps() if step <= newest]
        committed = [step for step in past if step not in self.damaged and self.is_committed(step)]
        kept = {*committed[-keep_last:], newest, best}
        gone = [step for step in past if step not in kept]
        for step in gone:
            self._remove(step)
        return gone


def _is_complete(files: Files) -> bool:
    """State, model and optimizer are there with all their parts, and nothing else is."""
    parts = max(1, (len(files) - 1) // len(KINDS))
    return files.keys() == {STATE, *(part_name(kind, i, parts) for kind in KINDS for i in range(parts))}


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def places(url: str) -> Iterator[SnapshotStore]:
    """Where the snapshots of a run directory may be, or of a directory of snapshots."""
    for candidate in (f"{url}/snapshots", url, _recorded_place(url)):
        if candidate:
            yield SnapshotStore(candidate)


def load(url: str) -> Snapshot:
    """The newest snapshot at a run directory, a directory of snapshots or one snapshot.

    Raises:
        SnapshotError: there is none.
    """
    url = url.rstrip("/")
    parent, _, last = url.rpartition("/")
    step = step_of(last)
    if step is not None:
        try:
            return SnapshotStore(parent or ".").read(step)
        except Damaged as damage:
            raise SnapshotError(f"{url} cannot be used: {damage}") from damage
    for store in places(url):
        found = store.newest()
        if found is not None:
            return found
    raise SnapshotError(f"there is no whole snapshot at {url}; name a run directory, its snapshots or one of them")


def _recorded_place(run: str) -> str | None:
    """Where a run directory says that it keeps its snapshots, if that is somewhere else."""
    try:
        path = yaml.safe_load(Storage(run).read("config.yaml", limit=SMALL))["snapshot"]["path"]
    except Exception:  # it is no run directory of ours
        return None
    return f"{path.rstrip('/')}/{run.rsplit('/', 1)[-1]}" if isinstance(path, str) else None
