"""Find, read and verify the snapshots below one URL. Every byte that is read is checked."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from mingpt_ddp.errors import SnapshotError, StorageUnavailableError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import (
    CorruptSnapshotError,
    Files,
    IncompleteSnapshotError,
    Snapshot,
    path_of,
)
from mingpt_ddp.snapshots.tensor_index import (
    Header,
    check_memory,
    decode,
    header_end,
    make_index,
    read_header,
)
from mingpt_ddp.storage.remote.remote_errors import StorageError
from mingpt_ddp.storage.urls import open_storage

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

CONCURRENT_FILES = 4  # files that are transferred at the same time from or to an object store


class StoreReader:
    """Reads the snapshots below a URL. The subclass SnapshotStore also writes and deletes them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.storage = open_storage(url)
        # Steps that failed verification. Retention does not count them.
        self.damaged: set[int] = set()

    def steps(self) -> list[int]:
        """List the steps that have a directory, in ascending order.

        Not every one of them is committed: a save may be in progress, or may have failed.

        Raises:
            StorageUnavailableError, SnapshotError: The URL cannot be read.
        """
        try:
            names = self.storage.list()
        except Exception as error:  # exceptions differ by protocol
            reason = " ".join(str(error).split()) or type(error).__name__
            kind = StorageUnavailableError if isinstance(error, StorageError) else SnapshotError
            raise kind(f"cannot list snapshots at {self.url}: {reason[:300]}") from error
        steps = [layout.step_of(name) for name in names]
        return sorted(step for step in steps if step is not None)

    def is_committed(self, step: int) -> bool:
        """Return True if the snapshot of a step has a manifest."""
        return self.size(step, layout.MANIFEST) is not None

    def size(self, step: int, name: str) -> int | None:
        """Return the size in bytes of a file in the snapshot of a step.

        Return None if there is no such regular file, or if it is unreachable (a loop of symbolic
        links, a bad disk).
        """
        try:
            return self.storage.size(path_of(step, name))
        except StorageError:
            raise
        except OSError:
            return None

    def files(self, step: int, kinds: Sequence[str] | None = None) -> Files:
        """Read the manifest and check the size of each file. Every reader starts here.

        Args:
            kinds: Return only state.json and the files with these kinds of tensors. None returns
                all files. ("model",) alone returns the averaged weights, if the snapshot has them.

        Raises:
            IncompleteSnapshotError: There is no manifest.
            CorruptSnapshotError: The manifest is damaged, or the size of a file is not the size
                in the manifest.
            SnapshotError: This version cannot read the format in which the snapshot was written.
            StorageError: The storage does not respond.
        """
        size = self.size(step, layout.MANIFEST)
        # If the manifest is a named pipe, this is None too: reading a pipe would block.
        if size is None:
            raise IncompleteSnapshotError("it was never finished")
        size = min(size, layout.MAX_MANIFEST_BYTES)
        manifest = b"".join(self._chunks(step, layout.MANIFEST, size))
        files = _select_kinds(layout.decode_manifest(manifest, step), kinds)
        with self._pool() as pool:
            sizes = pool.map(partial(self.size, step), files)
            for name, actual in zip(files, sizes, strict=True):
                if actual != files[name]["bytes"]:
                    raise CorruptSnapshotError(f"{name} is missing or has the wrong size")
        return files

    def read_metadata(
        self, step: int, kinds: Sequence[str] = layout.REQUIRED_KINDS
    ) -> tuple[Files, Any]:
        """Read the manifest and the state. Do not read the tensor files, only check their sizes.

        This raises the same exceptions as `files`.
        """
        files = self.files(step, kinds)
        try:
            state = layout.load_json(self._read_file(step, files, layout.STATE))
        except ValueError as error:
            raise CorruptSnapshotError(f"{layout.STATE} cannot be parsed") from error
        return files, state

    def read(
        self, step: int, kinds: Sequence[str] = layout.REQUIRED_KINDS, whole: bool = True
    ) -> Snapshot:
        """Read a snapshot and check every byte that is read against the manifest.

        Args:
            kinds: Kinds of tensors to read, as in `files`. The other kinds are left empty.
            whole: True reads the tensors into memory. False verifies the files in chunks and
                returns an index of the tensors' positions, from which each rank reads its shard.
                The tensors of hooks are read even then, because every rank needs them all.

        Raises:
            CorruptSnapshotError: The snapshot is incomplete, damaged or larger than the memory.
            StorageUnavailableError: The storage does not respond.
            SnapshotError: This version cannot read the format in which the snapshot was written.
        """
        try:
            files, state = self.read_metadata(step, kinds)
            del files[layout.STATE]
            index = None
            if not whole:
                index = self._index(step, files)
                files = {n: file for n, file in files.items() if layout.kind_of(n) == layout.HOOKS}
            tensors = self._read_tensors(step, files)
        except StorageError as error:  # not the fault of the snapshot
            raise StorageUnavailableError(
                f"cannot read the snapshot of step {step}: {error}"
            ) from error
        except MemoryError as error:
            raise CorruptSnapshotError("it is larger than the memory of this machine") from error
        except (ValueError, RuntimeError) as error:  # the digests are valid, the content is not
            reason = ascii(str(error))[1:-1]
            raise CorruptSnapshotError(f"it cannot be parsed: {reason[:200]}") from error
        # If only the model was asked for, its averaged weights may have been read instead.
        tensors["model"] = tensors["model"] or tensors["ema"]
        return Snapshot(step=step, state=state, index=index, **tensors)

    def _read_tensors(self, step: int, files: Files) -> dict[str, dict[str, Tensor]]:
        """Read the tensors in some files of a snapshot. Return them by kind and name.

        Raises:
            MemoryError: The tensors are larger than the memory.
            ValueError, RuntimeError: A file does not hold tensors, or a piece of a tensor is
                missing.
        """
        check_memory("it", sum(file["bytes"] for file in files.values()))
        contents: dict[str, dict[str, bytes]] = {kind: {} for kind in layout.TENSOR_KINDS}
        with self._pool() as pool:
            in_order = pool.map(partial(self._read_file, step, files), files)
            for name, content in zip(files, in_order, strict=True):
                contents[layout.kind_of(name)][name] = content
        # pop frees the bytes of a kind once it is decoded
        return {kind: decode(contents.pop(kind)) for kind in layout.TENSOR_KINDS}

    def _index(self, step: int, files: Files) -> dict[str, Any]:
        """Verify a snapshot. Return the URL and the positions of its tensors, as JSON values.

        Args:
            files: Files whose tensors the index lists.
        """
        headers = self.verify(step)
        index: dict[str, Any] = {"url": self.url}
        for kind in layout.WEIGHT_KINDS:
            names = [name for name in files if layout.kind_of(name) == kind]
            index[kind] = make_index({path_of(step, name): headers[name] for name in names})
        return index

    def newest_state(self) -> Snapshot | None:
        """Read the state of the newest snapshot whose state is undamaged, without its tensors.

        Return None if there is no such snapshot.

        Raises:
            SnapshotError: This version cannot read the format in which the snapshot was written.
            StorageUnavailableError: The storage does not respond.
        """
        for step in reversed(self.steps()):
            try:
                return self.read(step, kinds=())
            except CorruptSnapshotError:  # `read_latest` reports it
                continue
        return None

    def read_latest(
        self, kinds: Sequence[str] = layout.REQUIRED_KINDS, whole: bool = True
    ) -> Snapshot | None:
        """Read the newest undamaged snapshot. Log each newer snapshot that is skipped.

        Return None if there are no committed snapshots.

        Args:
            kinds, whole: See `read`.

        Raises:
            StorageUnavailableError: The storage does not respond.
            SnapshotError: All committed snapshots are damaged.
        """
        for step in reversed(self.steps()):
            directory = f"{self.url}/{layout.directory_name(step)}"
            try:
                return self.read(step, kinds, whole)
            except IncompleteSnapshotError:
                log.info("%s was never finished and is ignored", directory)
            except CorruptSnapshotError as damage:
                self.damaged.add(step)
                log.warning("damaged snapshot %s is ignored: %s", directory, damage)
        if self.damaged:
            raise SnapshotError(
                f"all snapshots at {self.url} are damaged; move them away, or use run.resume=never"
            )
        return None

    def verify(
        self, step: int, progress: Callable[[int], object] = lambda _: None
    ) -> dict[str, Header]:
        """Check every byte of a snapshot against its manifest.

        The files are read in chunks, because they may be larger than the memory.

        Args:
            progress: Called after each chunk with its number of bytes.

        Returns:
            The header of each file that holds tensors, by file name.

        Raises:
            CorruptSnapshotError: The snapshot is incomplete or damaged.
            StorageError: The storage does not respond.
        """
        headers = {}
        for name, file in self.files(step).items():
            try:
                header = self._verify_file(step, name, file, progress)
            except ValueError as error:
                raise CorruptSnapshotError(
                    f"{name} does not have the size that its header says"
                ) from error
            if header is not None:
                headers[name] = header
        return headers

    def _verify_file(
        self, step: int, name: str, file: dict[str, Any], progress: Callable[[int], object]
    ) -> Header | None:
        """Check a file against its manifest entry. Return its header if it holds tensors.

        Raise ValueError as soon as an invalid header has been read, without reading the rest of the
        file, which may be large.
        """
        size = file["bytes"]
        has_header = layout.kind_of(name) in layout.TENSOR_KINDS
        header = None
        start = b""
        for chunk in self._verified_chunks(step, name, file):
            progress(len(chunk))
            if not has_header or header is not None:
                continue
            start += chunk
            if len(start) >= header_end(start, size):
                header = read_header(start, size)
        if has_header and header is None:
            raise ValueError("it is empty")
        return header

    def _read_file(self, step: int, files: Files, name: str) -> bytes:
        return b"".join(self._verified_chunks(step, name, files[name]))

    def _verified_chunks(self, step: int, name: str, file: dict[str, Any]) -> Iterator[bytes]:
        """Yield the content of a file in chunks.

        After the last chunk, raise CorruptSnapshotError if the digest is not the one in the
        manifest.
        """
        digest = hashlib.sha256()
        for chunk in self._chunks(step, name, file["bytes"]):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != file["sha256"]:
            raise CorruptSnapshotError(f"{name} does not have the content that was written")

    def _chunks(self, step: int, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of a file in chunks.

        Raise CorruptSnapshotError if the storage responds, but the file cannot be read.
        """
        try:
            yield from self.storage.chunks(path_of(step, name), size)
        except StorageError:
            raise
        except OSError as error:
            raise CorruptSnapshotError(f"{name} cannot be read: {error}") from error

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(CONCURRENT_FILES if self.storage.shared else 1)


def _select_kinds(files: Files, kinds: Sequence[str] | None) -> Files:
    """Select state.json and the files with these kinds of tensors, for `StoreReader.files`."""
    if kinds is None:
        return files
    present = {layout.kind_of(name) for name in files}
    if tuple(kinds) == ("model",) and "ema" in present:
        kinds = ("ema",)
    wanted = ("state", *kinds)
    return {name: file for name, file in files.items() if layout.kind_of(name) in wanted}
