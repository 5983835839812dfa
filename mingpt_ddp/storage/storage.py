"""Read and write files by name below a URL. On a local disk, writes are atomic and durable."""

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
CHUNK = 1 << 23  # bytes of a local file that are in memory at once


class Storage:
    """A directory, addressed by relative names with forward slashes.

    This class is for a local disk. Its methods raise OSError. `RemoteStorage` is for all other
    filesystems. Its methods retry transient errors, return before the deadline of the operation,
    and raise a StorageError whose message is one line with the URL and the cause. No method creates
    a bucket.
    """

    has_flock = True  # locks end with their process, and writes are atomic and durable

    def __init__(self, url: str, root: str) -> None:
        self.url = url
        self.root = root
        base = split_protocol(url.rsplit("::", 1)[-1])[0] or "file"
        # True if all machines see the same files.
        self.shared = base not in ("file", "local", "memory")

    @property
    def has_lease(self) -> bool:
        """Whether a lease protects it: processes of all machines write here, without flock."""
        return self.shared and not self.has_flock

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a name below {self.url}")
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def read(self, name: str, limit: int | None = None) -> bytes:
        """Read the whole file, or its first `limit` bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        with open_regular(Path(self._path(name))) as file:
            return file.read(-1 if limit is None else limit)

    def chunks(self, name: str, size: int, start: int = 0) -> Iterator[bytes]:
        """Yield `size` bytes of a file from `start` on, in chunks. Only one chunk is in memory.

        Zero bytes yield no chunk.

        Raises:
            FileNotFoundError: There is no such file.
        """
        with open_regular(Path(self._path(name))) as file:
            file.seek(start)
            for done in range(0, size, CHUNK):
                yield file.read(min(CHUNK, size - done))

    def write(self, name: str, content: Content) -> None:
        """Write a file atomically. On a local disk it is durable when this returns.

        A local disk and S3 do not copy large content as a whole.
        """
        atomic_write(Path(self._path(name)), content)

    def size(self, name: str) -> int | None:
        """Return the size of the file in bytes, or None if there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._path(name))
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        return None

    def list(self) -> list[str]:
        """Return the sorted names directly below this directory, or [] if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.root))
        return []

    def delete(self, name: str) -> None:
        """Delete a file, or a directory with its contents, if there is one.

        A symbolic link is deleted, not its target. On S3, this also aborts unfinished multipart
        uploads below the name.
        """
        path = Path(self._path(name))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: str = "rb") -> IO[Any]:
    """Open a regular file, without blocking on a named pipe.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, mode)


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: It is not a regular file, is larger or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content


def atomic_write(path: Path, content: Content, mode: int = 0o666) -> None:
    """Write a local file atomically. Readers see the old content or the new content.

    This also holds after a power failure.

    Args:
        mode: Permissions of the file, before the umask.
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
    """Fsync a local directory, so that its entries are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
