"""The snapshots of a run on disk or in an object store: write, read, verify, delete old ones.

A process may be killed (SIGKILL) at any moment: a snapshot exists once its manifest does, which is
written last.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt_ddp.distributed.machine import installed_memory
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import (
    CorruptSnapshotError,
    Files,
    IncompleteSnapshotError,
    Snapshot,
)
from mingpt_ddp.snapshots.pieces import make_index, merge
from mingpt_ddp.snapshots.staging_buffer import MAX_HEADER_BYTES, decode, fits_header, read_header
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.remote import StorageError
from mingpt_ddp.storage.urls import open_storage

log = logging.getLogger(__name__)

PARALLEL = 4  # concurrent transfers of files with an object store


class SnapshotStore:
    """The snapshots of one run below one URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.storage = open_storage(url)
        # steps that failed verification; retention does not count them
        self.damaged: set[int] = set()
        self.lease: Lease | None = None  # ownership on an object store, which has no file locks
        # raises RunError if a locked directory is gone
        self.check_owner: Callable[[], None] = lambda: None

    def steps(self) -> list[int]:
        """List the steps that have a directory, committed or not, in ascending order.

        Raises:
            StorageUnavailableError, SnapshotError: the URL cannot be read.
        """
        try:
            names = self.storage.list()
        except Exception as error:  # exceptions differ by protocol
            reason = " ".join(str(error).split()) or type(error).__name__
            kind = StorageUnavailableError if isinstance(error, StorageError) else SnapshotError
            raise kind(f"cannot list snapshots at {self.url}: {reason[:300]}") from error
        return sorted(step for name in names if (step := layout.step_of(name)) is not None)

    def is_committed(self, step: int) -> bool:
        return self.size(step, layout.MANIFEST) is not None

    def size(self, step: int, name: str) -> int | None:
        """Return the bytes of a regular file; None if there is none or it is unreachable (symlink
        loop, bad disk).
        """
        try:
            return self.storage.size(f"{layout.directory_name(step)}/{name}")
        except StorageError:
            raise
        except OSError:
            return None

    # Writing: begin, then write_files (every rank its files), then commit.

    def begin(self, step: int) -> None:
        """Make room for a snapshot, unless the run has lost its directory.

        Raises:
            RunError: it was deleted or moved.
        """
        self.check_owner()
        self.clear(step)

    def clear(self, step: int) -> None:
        """Delete a snapshot or the files of a failed save; manifest first, so that a partial
        deletion uncommits it.
        """
        self.damaged.discard(step)
        if not (
            self.storage.local and Path(self.storage.root, layout.directory_name(step)).is_symlink()
        ):
            self.storage.delete(f"{layout.directory_name(step)}/{layout.MANIFEST}")
        # a symbolic link is deleted, not its target
        self.storage.delete(layout.directory_name(step))

    def write_files(self, step: int, contents: Mapping[str, memoryview | bytes]) -> Files:
        """Write some of the files of a snapshot; return their manifest entries."""
        names = [f"{layout.directory_name(step)}/{name}" for name in contents]
        with self._pool() as pool:
            digests = list(pool.map(hashlib.sha256, contents.values()))
            list(pool.map(self.storage.write, names, contents.values()))
        sizes = map(len, contents.values())
        return {
            n: {"bytes": s, "sha256": d.hexdigest()}
            for n, s, d in zip(contents, sizes, digests, strict=True)
        }

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(PARALLEL if self.storage.shared else 1)

    def commit(self, step: int, files: Files) -> None:
        """Write the manifest, if all files are there: from then on the snapshot exists.

        Args:
            files: of all ranks, as `write_files` returned them.

        Raises:
            OSError: a file is missing or has another size, or the manifest cannot be written.
            RunError: another process has taken over the lease, or the run directory was deleted.
        """
        for name, file in files.items():
            if self.storage.size(f"{layout.directory_name(step)}/{name}") != file["bytes"]:
                raise OSError(f"{name} is missing or has another size than was written")
        self.check_owner()
        if self.lease is not None:
            self.lease.check()
        manifest = layout.encode_manifest(step, files)
        self.storage.write(f"{layout.directory_name(step)}/{layout.MANIFEST}", manifest)

    # Reading.

    def files(self, step: int, kinds: Sequence[str] | None = None) -> Files:
        """Read the manifest and compare the file sizes; every reader starts here.

        Args:
            kinds: of the tensors; only their files and the state are returned. None: all files. The
                model alone is its averaged weights, if the snapshot has some.

        Raises:
            IncompleteSnapshotError: there is no manifest.
            CorruptSnapshotError: the manifest is damaged, or a file has another size.
            SnapshotError: another version wrote it, in another format.
            StorageError: the storage does not respond.
        """
        size = self.size(step, layout.MANIFEST)
        if size is None:  # or it is a pipe, which would block
            raise IncompleteSnapshotError("it was never finished")
        content = b"".join(
            self._chunks(step, layout.MANIFEST, min(size, layout.MAX_MANIFEST_BYTES))
        )
        listed = layout.decode_manifest(content, step)
        if (
            kinds is not None
            and tuple(kinds) == ("model",)
            and "ema" in map(layout.kind_of, listed)
        ):
            kinds = ("ema",)
        files = {
            n: file
            for n, file in listed.items()
            if kinds is None or layout.kind_of(n) in ("state", *kinds)
        }
        with self._pool() as pool:
            for name, size in zip(files, pool.map(partial(self.size, step), files), strict=True):
                if size != files[name]["bytes"]:
                    raise CorruptSnapshotError(f"{name} is missing or has another size")
        return files

    def read_metadata(self, step: int, kinds: Sequence[str] = layout.KINDS) -> tuple[Files, Any]:
        """Read the manifest and the state; check only the sizes of the tensor files.

        Raises as `files` does.
        """
        files = self.files(step, kinds)
        try:
            return files, layout.load_json(self._read_file(step, files, layout.STATE))
        except ValueError as error:
            raise CorruptSnapshotError(f"{layout.STATE} cannot be parsed") from error

    def read(self, step: int, kinds: Sequence[str] = layout.KINDS, whole: bool = True) -> Snapshot:
        """Read a snapshot and check every byte that is read against the manifest.

        Args:
            kinds: which tensors to read, see `files`; the others are left empty.
            whole: False checks the tensors in chunks, and returns the index of where they are.

        Raises:
            CorruptSnapshotError: it is incomplete, damaged or larger than the memory.
            StorageUnavailableError: the storage does not respond.
            SnapshotError: another version wrote it, in another format.
        """
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in layout.TENSOR_KINDS}
        try:
            files, state = self.read_metadata(step, kinds)
            del files[layout.STATE]
            if not whole:
                self.verify(step)
                return Snapshot(step, {}, {}, state, index=self._index(step, files))
            # as bytes and as tensors
            if 2 * sum(file["bytes"] for file in files.values()) > installed_memory():
                raise MemoryError
            with self._pool() as pool:
                contents = list(pool.map(partial(self._read_file, step, files), files))
            for name in reversed(files):  # pop: free the bytes of a decoded file
                known = tensors[layout.kind_of(name)]
                more = decode(contents.pop())
                if twice := known.keys() & more.keys():
                    raise ValueError(f"{min(twice)[:100]} is in two files")
                known.update(more)
            tensors = {kind: merge(named) for kind, named in tensors.items()}
        except StorageError as error:  # not the fault of the snapshot
            raise StorageUnavailableError(
                f"cannot read the snapshot of step {step}: {error}"
            ) from error
        except MemoryError as error:
            raise CorruptSnapshotError("it is larger than the memory of this machine") from error
        except ValueError as error:  # valid digests, but not our file
            raise CorruptSnapshotError(
                f"cannot be parsed: {ascii(str(error))[1:-1][:200]}"
            ) from error
        weights = tensors["model"] or tensors["ema"]  # the latter if the model alone is read
        return Snapshot(step, weights, tensors["optimizer"], state, tensors["ema"])

    def _index(self, step: int, files: Files) -> dict[str, Any]:
        """Return the URL and, by kind, where each tensor is: JSON values."""

        def read(name: str) -> Any:
            size = files[name]["bytes"]
            start = b"".join(self._chunks(step, name, min(size, 8)))
            length = min(int.from_bytes(start, "little"), MAX_HEADER_BYTES, size - len(start))
            return read_header(start + b"".join(self._chunks(step, name, length, 8)), size)

        with self._pool() as pool:
            headers = dict(zip(files, pool.map(read, files), strict=True))
        by_kind = {
            kind: {n: h for n, h in headers.items() if layout.kind_of(n) == kind}
            for kind in layout.TENSOR_KINDS
        }
        return {"url": self.url, **{kind: make_index(named) for kind, named in by_kind.items()}}

    def newest_state(self) -> Snapshot | None:
        """Read the newest undamaged state, without tensors; None if there is none.

        Raises:
            SnapshotError: another version wrote it, in another format.
            StorageUnavailableError: the storage does not respond.
        """
        for step in reversed(self.steps()):
            try:
                return self.read(step, kinds=())
            except CorruptSnapshotError:  # `read_latest` reports it
                continue
        return None

    def read_latest(
        self, kinds: Sequence[str] = layout.KINDS, whole: bool = True
    ) -> Snapshot | None:
        """Read the newest undamaged snapshot; log one line for each newer damaged one.

        Args:
            kinds, whole: see `read`.

        Raises:
            StorageUnavailableError: the storage does not respond.
            SnapshotError: all committed snapshots are damaged.
        """
        for step in reversed(self.steps()):
            try:
                return self.read(step, kinds, whole)
            except IncompleteSnapshotError:
                log.info(
                    "%s/%s was never finished and is ignored", self.url, layout.directory_name(step)
                )
            except CorruptSnapshotError as damage:
                self.damaged.add(step)
                log.warning(
                    "damaged snapshot %s/%s is ignored: %s",
                    self.url,
                    layout.directory_name(step),
                    damage,
                )
        if self.damaged:
            raise SnapshotError(
                f"all snapshots at {self.url} are damaged; move them away, or use run.resume=never"
            )
        return None

    def verify(self, step: int, progress: Callable[[int], object] = lambda _: None) -> Files:
        """Compare every byte with the manifest, in chunks: a snapshot may be larger than the
        memory.

        Args:
            progress: called with the number of bytes of each chunk.

        Returns:
            What the manifest lists.

        Raises:
            CorruptSnapshotError: it is incomplete or damaged.
            StorageError: the storage does not respond.
        """
        files = self.files(step)
        for name, file in files.items():
            for number, chunk in enumerate(self._verified_chunks(step, name, file)):
                if (
                    number == 0
                    and name.startswith(layout.TENSOR_KINDS)
                    and not fits_header(chunk, file["bytes"])
                ):
                    raise CorruptSnapshotError(f"{name} has another size than its header says")
                progress(len(chunk))
        return files

    def _read_file(self, step: int, files: Files, name: str) -> bytes:
        return b"".join(self._verified_chunks(step, name, files[name]))

    def _verified_chunks(self, step: int, name: str, file: dict[str, Any]) -> Iterator[bytes]:
        """Yield the content of a file.

        Raise CorruptSnapshotError at its end if it has another digest.
        """
        digest = hashlib.sha256()
        for chunk in self._chunks(step, name, file["bytes"]):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != file["sha256"]:
            raise CorruptSnapshotError(f"{name} has other content than was written")

    def _chunks(self, step: int, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield the content of a file.

        Raise CorruptSnapshotError if it is unreadable though the storage responds.
        """
        try:
            yield from self.storage.chunks(f"{layout.directory_name(step)}/{name}", size, start)
        except StorageError:
            raise
        except OSError as error:
            raise CorruptSnapshotError(f"{name} cannot be read: {error}") from error

    # Retention.

    def expired_steps(
        self, keep_last: int, best: int | None, newest: int, every: int | None = None
    ) -> list[int]:
        """List all steps up to `newest` except the last `keep_last` committed ones, the `best` one
        and milestones.

        Milestones are the committed steps that `every` divides.

        Directories beyond `newest` are from before the run resumed from an older snapshot. They are
        kept until the run saves those steps again.
        """
        past = [step for step in self.steps() if step <= newest]
        committed = [step for step in past if step not in self.damaged and self.is_committed(step)]
        milestones = (step for step in committed if every and step % every == 0)
        kept = {*committed[-keep_last:], *milestones, newest, best}
        return [step for step in past if step not in kept]

    def prune(
        self, keep_last: int, best: int | None, newest: int, every: int | None = None
    ) -> None:
        """Delete the expired steps."""
        for step in self.expired_steps(keep_last, best, newest, every):
            self.clear(step)
