"""Write, commit and delete the snapshots of a run, on disk or in an object store.

A process may be killed (SIGKILL) at any moment: a snapshot exists once its manifest does, which
`SnapshotStore.commit` writes last.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mingpt_ddp.errors import RunError, StorageUnavailableError
from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import Files, path_of
from mingpt_ddp.snapshots.store_reader import StoreReader
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.yaml_and_json import check_size


class SnapshotStore(StoreReader):
    """Reads, writes and deletes the snapshots of one run, which are below one URL."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # Protects the URL on an object store, where files cannot be locked. None on a disk.
        self._lease: Lease | None = None
        # Steps that were committed when this run started, or that it has committed itself. Only
        # `begin` uses them, if there is a lease.
        self._known: set[int] = set()
        # Called before a snapshot is written or committed. Raises RunError if the locked directory
        # of the run was deleted or moved.
        self.check_owner: Callable[[], None] = lambda: None

    def hold(self, lease: Lease) -> None:
        """Protect all further writes by a lease, and note which snapshots are committed already.

        Raises:
            StorageUnavailableError, SnapshotError: The URL cannot be read.
        """
        self._lease = lease
        steps = self.steps()
        try:
            with self._pool() as pool:
                are_committed = list(pool.map(self.is_committed, steps))
        except OSError as error:
            raise StorageUnavailableError(f"cannot use {self.url}: {error}") from error
        self._known = {step for step, known in zip(steps, are_committed, strict=True) if known}

    def check_lease(self) -> None:
        """Check that this run still holds the lease on its object store, if it has one.

        Raises:
            RunError: Another process has taken over the lease.
            OSError: The storage does not respond.
        """
        if self._lease is not None:
            self._lease.check()

    # A save calls begin, then write_files on every rank, then commit.

    def begin(self, step: int) -> None:
        """Delete the files at a step, to make room for its snapshot.

        On an object store, a suspended process may wake up here after another process has taken
        over the lease. It must not delete the snapshots of that process. Therefore, a snapshot that
        this run neither found at its start nor wrote itself is kept, and files without a manifest
        are overwritten instead of deleted.

        Raises:
            RunError: The run directory was deleted or moved, or another process has taken over the
                lease.
            OSError: The storage does not respond.
        """
        self.check_owner()
        if self._lease is None:
            self.clear(step)
            return
        self.check_lease()
        if not self.is_committed(step):
            return
        if step not in self._known:
            raise RunError(
                f"{self.url} was taken over by another process, which has committed the snapshot "
                f"of step {step} there; this run ends here and leaves that snapshot as it is"
            )
        self.delete(step)

    def write_files(self, step: int, contents: Mapping[str, memoryview | bytes]) -> Files:
        """Write some files of a snapshot. Return their entries for the manifest.

        Raises:
            OSError: A file cannot be written, or is larger than a reader of snapshots accepts.
        """
        if layout.STATE in contents:
            check_size(bytes(contents[layout.STATE]), layout.MAX_STATE_BYTES)
        paths = [path_of(step, name) for name in contents]
        with self._pool() as pool:
            digests = list(pool.map(hashlib.sha256, contents.values()))
            list(pool.map(self.storage.write, paths, contents.values()))
        files = {}
        for (name, content), digest in zip(contents.items(), digests, strict=True):
            files[name] = {"bytes": len(content), "sha256": digest.hexdigest()}
        return files

    def commit(
        self, step: int, by_rank: Sequence[Files], record: Callable[[], None] | None = None
    ) -> None:
        """Write the manifest if all files are there. From then on, the snapshot exists.

        Args:
            by_rank: For each rank, the manifest entries that `write_files` returned.
            record: Called just before the manifest is written. Records the snapshot in the ledger.

        Raises:
            OSError: A file is missing or has the wrong size, or the manifest cannot be written.
            RunError: Another process has taken over the lease, or the run directory was deleted.
        """
        files: Files = {}
        for files_of_rank in by_rank:
            files.update(sorted(files_of_rank.items()))
        for name, file in files.items():
            if self.storage.size(path_of(step, name)) != file["bytes"]:
                raise OSError(f"{name} is missing or has the wrong size")
        self.check_owner()
        self.check_lease()
        if record is not None:
            record()
        manifest = check_size(layout.encode_manifest(step, files), layout.MAX_MANIFEST_BYTES)
        # Do this before the request, which may succeed although its response is lost.
        self._known.add(step)
        self.storage.write(path_of(step, layout.MANIFEST), manifest)

    def delete(self, step: int) -> None:
        """Delete a snapshot, or the files of a failed save, if the run still holds its lease.

        Raises:
            RunError: Another process has taken over the lease.
            OSError: The storage does not respond.
        """
        self.check_lease()
        self.clear(step)
        self._known.discard(step)

    def clear(self, step: int) -> None:
        """Delete a snapshot, or the files of a failed save, without a check of the lease.

        The manifest is deleted first. If the deletion is interrupted, the snapshot is not committed
        any more.
        """
        self.damaged.discard(step)
        directory = layout.directory_name(step)
        is_link = self.storage.has_flock and Path(self.storage.root, directory).is_symlink()
        if not is_link:
            self.storage.delete(path_of(step, layout.MANIFEST))
        self.storage.delete(directory)  # a symbolic link is deleted, not its target
