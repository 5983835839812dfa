"""The snapshots of a run on disk or in an object store: write, commit, delete; reading is below.

A process may be killed (SIGKILL) at any moment: a snapshot exists once its manifest does, which
`SnapshotStore.commit` writes last.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mingpt_ddp.snapshots import format as layout
from mingpt_ddp.snapshots.format import Files, path_of
from mingpt_ddp.snapshots.store_reader import StoreReader
from mingpt_ddp.storage.lease import Lease
from mingpt_ddp.storage.yaml_and_json import check_size


class SnapshotStore(StoreReader):
    """The snapshots of one run below one URL, to read, write and delete them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lease: Lease | None = None  # ownership on an object store, which has no file locks
        # It raises RunError if a locked directory is gone.
        self.check_owner: Callable[[], None] = lambda: None

    # A save: begin, then write_files (every rank its files), then commit.

    def begin(self, step: int) -> None:
        """Make room for a snapshot, unless the run has lost its directory.

        Raises:
            RunError: it was deleted or moved.
        """
        self.check_owner()
        self.clear(step)

    def write_files(self, step: int, contents: Mapping[str, memoryview | bytes]) -> Files:
        """Write some of the files of a snapshot; return their manifest entries.

        Raises:
            OSError: one cannot be written, or could not be read again.
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
        """Write the manifest, if all files are there: from then on the snapshot exists.

        Args:
            by_rank: the entries of each rank's files, as `write_files` returned them.
            record: called when nothing but the manifest is missing, by the owner of the store.

        Raises:
            OSError: a file is missing or has another size, or the manifest cannot be written.
            RunError: another process has taken over the lease, or the run directory was deleted.
        """
        files: Files = {}
        for files_of_rank in by_rank:
            files.update(sorted(files_of_rank.items()))
        for name, file in files.items():
            if self.storage.size(path_of(step, name)) != file["bytes"]:
                raise OSError(f"{name} is missing or has another size than was written")
        self.check_owner()
        if self.lease is not None:
            self.lease.check()
        if record is not None:
            record()
        manifest = check_size(layout.encode_manifest(step, files), layout.MAX_MANIFEST_BYTES)
        self.storage.write(path_of(step, layout.MANIFEST), manifest)

    def clear(self, step: int) -> None:
        """Delete a snapshot or the files of a failed save.

        The manifest goes first, so that a partial deletion uncommits the snapshot.
        """
        self.damaged.discard(step)
        directory = layout.directory_name(step)
        is_link = self.storage.local and Path(self.storage.root, directory).is_symlink()
        if not is_link:
            self.storage.delete(path_of(step, layout.MANIFEST))
        self.storage.delete(directory)  # a symbolic link is deleted, not its target
