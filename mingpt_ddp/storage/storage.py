"""Read and write files by name below a URL. On a local disk, writes are atomic and durable.

The functions at the end read and write files on a local disk by path.
"""

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fsspec.core import split_protocol

Content = bytes | bytearray | memoryview
CHUNK_BYTES = 1 << 23  # size of the chunks in which a local file is read


class Storage:
    """A directory whose files are addressed by relative names with forward slashes.

    This class is for a local disk, and its methods raise OSError. `RemoteStorage` is for all other
    filesystems. Its methods retry transient errors, return before the deadline of the operation,
    and raise a StorageError, whose message is one line with the URL and the cause. No method
    creates a bucket.
    """

    # True for a local disk: it has locks that end with their process, and writes are atomic and
    # durable.
    has_flock = True

    def __init__(self, url: str, root: str) -> None:
        self.url = url
        self.root = root
        base = split_protocol(url.rsplit("::", 1)[-1])[0] or "file"
        # True if all machines see the same files at this URL.
        self.shared = base not in ("file", "local", "memory")

    @property
    def needs_lease(self) -> bool:
        """True if a lease must protect the files.

        This is so if processes on all machines can write the files, but cannot lock them with
        flock.
        """
        return self.shared and not self.has_flock

    def _path(self, name: str) -> str:
        """Return the path of a file. Refuse a name that leads out of the directory."""
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a name below {self.url}")
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def read(self, name: str, limit: int | None = None) -> bytes:
        """Read a whole file, or its first `limit` bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        with open_regular(Path(self._path(name))) as file:
            return file.read(-1 if limit is None else limit)

    def chunks(self, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield `size` bytes of a file from byte `start` on, in chunks.

        Only one chunk is in memory at a time. If `size` is zero, no chunk is yielded.

        Raises:
            FileNotFoundError: There is no such file.
        """
        with open_regular(Path(self._path(name))) as file:
            file.seek(start)
            for done in range(0, size, CHUNK_BYTES):
                yield file.read(min(CHUNK_BYTES, size - done))

    def write(self, name: str, content: Content) -> None:
        """Write a file atomically. On a local disk, it is durable when this method returns.

        On a local disk and on S3, large content is not copied in memory as a whole.
        """
        atomic_write(Path(self._path(name)), content)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._path(name))
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        return None

    def list(self) -> list[str]:
        """List the names of files and directories in this directory, sorted.

        Return [] if the directory does not exist.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.root))
        return []

    def delete(self, name: str) -> None:
        """Delete a file, or a directory with its contents. Do nothing if it does not exist.

        A symbolic link is deleted, but not its target. On S3, this also aborts unfinished multipart
        uploads at or below the name.
        """
        path = Path(self._path(name))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> IO[Any]:
    """Open a regular file. Never block, which opening a named pipe would do.

    Raises:
        OSError: The path is not a regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, mode)


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: The path is not a regular file, or the file is larger or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content


def atomic_write(path: Path, content: Content, mode: int = 0o666) -> None:
    """Write a local file atomically: readers see the old content or the new content.

    This also holds after a power failure.

    Args:
        mode: Permissions of the file. The umask is applied to them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Fsync a local directory, so that the names of its files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
