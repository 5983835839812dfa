"""The snapshots of a run on disk or in an object store, in a form that a kill at any moment leaves whole."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt_ddp.distributed.memory import installed_memory
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots.buffer import decode
from mingpt_ddp.snapshots.format import (
    KINDS,
    LARGEST_MANIFEST,
    MANIFEST,
    STATE,
    CorruptSnapshotError,
    Files,
    IncompleteSnapshotError,
    Snapshot,
    directory_name,
    files_of,
    manifest_of,
    step_of,
    strict_json_loads,
)
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.storage import Storage, StorageError

log = logging.getLogger(__name__)

PARALLEL = 4  # files written to or read from an object store at the same time


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
            StorageUnavailableError, SnapshotError: the place cannot be read.
        """
        try:
            names = self.storage.list()
        except Exception as error:  # every protocol fails in its own way
            reason = " ".join(str(error).split()) or type(error).__name__
            kind = StorageUnavailableError if isinstance(error, StorageError) else SnapshotError
            raise kind(f"cannot look for snapshots at {self.url}: {reason[:300]}") from error
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def is_committed(self, step: int) -> bool:
        return self._size(f"{directory_name(step)}/{MANIFEST}") is not None

    def _size(self, path: str) -> int | None:
        """Bytes of a regular file that can be reached, else None: links may lead in a circle, disks may be broken."""
        try:
            return self.storage.size(path)
        except StorageError:
            raise
        except OSError:
            return None

    # Writing, in three stages, of which several ranks may share the second.

    def clear(self, step: int) -> None:
        """Remove what an earlier attempt left of this step."""
        self.damaged.discard(step)
        self._remove(step)

    def write_files(self, step: int, contents: Mapping[str, memoryview | bytes]) -> Files:
        """Write some of the files of a snapshot; return their entries of the manifest."""
        names = [f"{directory_name(step)}/{name}" for name in contents]
        with self._pool() as pool:
            digests = pool.map(hashlib.sha256, contents.values())
            files = {
                name: {"bytes": len(content), "sha256": digest.hexdigest()}
                for (name, content), digest in zip(contents.items(), digests, strict=True)
            }
            list(pool.map(self.storage.write, names, contents.values()))
        return files

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(PARALLEL if self.storage.shared else 1)

    def make_manifest(self, step: int, files: Files) -> dict[str, bytes]:
        """Check that all files have been written; return the manifest, whose writing commits the snapshot.

        Raises:
            OSError: a file is missing or has another size.
            RunError: another process has taken over this directory of snapshots.
        """
        for name, file in files.items():
            if self.storage.size(f"{directory_name(step)}/{name}") != file["bytes"]:
                raise OSError(f"{name} is not there as it was written")
        if self.lease is not None:
            self.lease.check()
        return {MANIFEST: manifest_of(step, files)}

    def _remove(self, step: int) -> None:
        """The manifest goes first, so that a snapshot which is deleted half-way does not exist."""
        if not (self.storage.local and Path(self.storage.root, directory_name(step)).is_symlink()):
            self.storage.delete(f"{directory_name(step)}/{MANIFEST}")
        self.storage.delete(directory_name(step))  # a link alone, and not what it leads to

    # Reading.

    def read(self, step: int, kinds: Sequence[str] = KINDS) -> Snapshot:
        """A snapshot, every byte that is read checked against the manifest.

        Args:
            kinds: which tensors are wanted; there are none of the others.

        Raises:
            CorruptSnapshotError: it is not whole.
            StorageUnavailableError: the storage does not answer.
            SnapshotError: the snapshot is of a newer format.
        """
        try:
            wanted = (STATE, *kinds)
            files = {name: file for name, file in self.files(step).items() if name.startswith(wanted)}
            # As bytes and as tensors, some of them at the same time.
            if 2 * sum(file["bytes"] for file in files.values()) > installed_memory():
                raise CorruptSnapshotError("it is larger than the memory of this machine")
            with self._pool() as pool:
                read = pool.map(lambda name: self._verified(step, name, files[name]), files)
                contents = dict(zip(files, read, strict=True))
        except StorageError as error:  # that says nothing about the snapshot
            raise StorageUnavailableError(f"cannot read the snapshot of step {step}: {error}") from error
        except MemoryError as error:
            raise CorruptSnapshotError("it is larger than the memory of this machine") from error
        try:
            state = strict_json_loads(contents.pop(STATE))
            tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
            for name in list(contents):  # a file goes when its tensors are there
                tensors[re.split("[.-]", name)[0]].update(decode(contents.pop(name)))
            return Snapshot(step, tensors["model"], tensors["optimizer"], state)
        except (ValueError, RecursionError, MemoryError) as error:  # as in the manifest, but nothing that we wrote
            raise CorruptSnapshotError(f"cannot be parsed: {ascii(str(error))[1:-1][:200]}") from error

    def verify(self, step: int, progress: Callable[[int], object] = lambda _: None) -> Files:
        """Compare every byte with the manifest, a piece at a time, however large the snapshot is.

        Args:
            progress: is told how many bytes more have been read.

        Returns:
            What the manifest lists.

        Raises:
            CorruptSnapshotError: it is not whole.
            StorageError: the storage does not answer.
        """
        files = self.files(step)
        for name, expected in files.items():
            self._check_size(step, name, expected)
            digest = hashlib.sha256()
            with _reading(name):
                for chunk in self.storage.chunks(f"{directory_name(step)}/{name}", expected_size=expected["bytes"]):
                    digest.update(chunk)
                    progress(len(chunk))
            self._check_digest(name, digest.hexdigest(), expected)
        return files

    def read_metadata(self, step: int) -> tuple[Files, Any]:
        """What the manifest lists, and the state; of the tensors only the sizes are compared.

        Raises:
            CorruptSnapshotError: that much shows that it is not whole.
            StorageError: the storage does not answer.
        """
        files = self.files(step)
        for name, expected in files.items():
            if name != STATE:
                self._check_size(step, name, expected)
        try:
            return files, strict_json_loads(self._verified(step, STATE, files[STATE]))
        except (ValueError, RecursionError) as error:
            raise CorruptSnapshotError(f"{STATE} cannot be parsed") from error

    def files(self, step: int) -> Files:
        """What the manifest lists.

        Raises:
            IncompleteSnapshotError: there is none.
            CorruptSnapshotError: it is not as we write it.
            StorageError: the storage does not answer.
        """
        path = f"{directory_name(step)}/{MANIFEST}"
        size = self._size(path)
        if size is None:  # also where it is a pipe, which could be read for ever
            raise IncompleteSnapshotError("it was never finished")
        with _reading(MANIFEST):
            content = self.storage.read(path, limit=LARGEST_MANIFEST, expected_size=size)
        return files_of(content, step)

    def _verified(self, step: int, name: str, expected: dict[str, Any]) -> bytes:
        self._check_size(step, name, expected)
        with _reading(name):
            content = self.storage.read(f"{directory_name(step)}/{name}", expected_size=expected["bytes"])
        self._check_digest(name, hashlib.sha256(content).hexdigest(), expected)
        return content

    def _check_size(self, step: int, name: str, expected: dict[str, Any]) -> None:
        if self._size(f"{directory_name(step)}/{name}") != expected["bytes"]:
            raise CorruptSnapshotError(f"{name} is missing or has another size")

    @staticmethod
    def _check_digest(name: str, digest: str, expected: dict[str, Any]) -> None:
        if digest != expected["sha256"]:
            raise CorruptSnapshotError(f"{name} has other content than was written")

    def read_latest(self, kinds: Sequence[str] = KINDS) -> Snapshot | None:
        """The newest whole snapshot; each damaged one that is newer is reported in one line.

        Args:
            kinds: which tensors are wanted.

        Raises:
            StorageUnavailableError: the storage does not answer.
            SnapshotError: all that were committed are damaged.
        """
        for step in reversed(self.steps()):
            try:
                return self.read(step, kinds)
            except IncompleteSnapshotError:
                log.info("%s/%s was never finished and is ignored", self.url, directory_name(step))
            except CorruptSnapshotError as damage:
                self.damaged.add(step)
                log.warning("damaged snapshot %s/%s is ignored: %s", self.url, directory_name(step), damage)
        if self.damaged:
            raise SnapshotError(f"all snapshots at {self.url} are damaged; move them away, or use run.resume=never")
        return None

    def expired_steps(self, keep_last: int, best: int | None, newest: int) -> list[int]:
        """All but the last `keep_last` committed snapshots up to `newest` and the `best` one.

        Directories beyond `newest` belong to a future that this run left behind by resuming from an older snapshot;
        they stay until it writes them anew.
        """
        past = [step for step in self.steps() if step <= newest]
        committed = [step for step in past if step not in self.damaged and self.is_committed(step)]
        kept = {*committed[-keep_last:], newest, best}
        return [step for step in past if step not in kept]

    def prune(self, keep_last: int, best: int | None, newest: int) -> list[int]:
        """Delete what is `surplus`; which went."""
        gone = self.expired_steps(keep_last, best, newest)
        for step in gone:
            self._remove(step)
        return gone


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """A file that cannot be read is damage; a storage that does not answer says nothing about it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise CorruptSnapshotError(f"{name} cannot be read: {error}") from error
