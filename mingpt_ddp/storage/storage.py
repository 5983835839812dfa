"""Files by name below a URL: local directories, memory:// and every other fsspec protocol behind one interface."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.remote import RemoteFiles
from mingpt_ddp.storage.remote import StorageError as StorageError
from mingpt_ddp.storage.s3 import S3Files

S3 = ("s3", "s3a")
# Endpoint, credentials and region come from the environment and files that all AWS tools read; `RetryPolicy` retries.
S3_OPTIONS: dict[str, Any] = {"config_kwargs": {"retries": {"max_attempts": 0}}}
READ_ONLY = ("http", "https")


def check_url(url: str, key: str, writable: bool = False) -> None:
    """Refuse a URL whose protocol is unknown or not installed, or, if `writable`, read-only.

    Raises:
        ConfigError: naming `key`, the configuration key that holds the URL.
    """
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        if writable and protocol in READ_ONLY:
            raise ConfigError(f"{key}={url}: {protocol}:// is read-only; use a directory or an object store")
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise ConfigError(f"{key}={url}: no such protocol as {protocol}://") from error
        except ImportError as error:
            package = "mingpt_ddp[s3]" if protocol in S3 else f"fsspec[{protocol}]"
            raise ConfigError(f"{key}={url}: {protocol}:// is not installed; pip install '{package}'") from error


class Storage:
    """A directory of small trees, addressed by relative names with forward slashes.

    On a local disk all methods raise OSError. On any other filesystem they retry transient errors, return before the
    deadline of the operation (see remote.py) and raise StorageError: one line that names the URL and the cause. No
    method creates a bucket.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        base = split_protocol(self.url.rsplit("::", 1)[-1])[0] or "file"
        options = S3_OPTIONS if split_protocol(self.url)[0] in S3 else {}
        # An instance of its own, so that its cache of listings is never older than the last request made here.
        fs, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **options)
        self.shared = base not in ("file", "local", "memory")  # all machines see the same files
        self.local = isinstance(fs, LocalFileSystem)  # flock works
        self._files: LocalFiles | RemoteFiles
        self._files = LocalFiles() if self.local else S3Files(fs) if options else RemoteFiles(fs)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a name below {self.url}")
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def read(self, name: str, limit: int | None = None, expected_size: int | None = None) -> bytes:
        """Read the whole file, or its first `limit` bytes.

        Args:
            expected_size: bytes of the file, as `size` has just returned: it saves a remote storage one request.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._files.read(self._path(name), limit, expected_size)

    def chunks(self, name: str, size: int = 1 << 23, expected_size: int | None = None) -> Iterator[bytes]:
        """Read the file in chunks of `size` bytes, with one in memory at a time; an empty file has none.

        Args:
            expected_size: as for `read`.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._files.chunks(self._path(name), size, expected_size)

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Write a file atomically; on a local disk it is durable when this returns.

        Large content is never copied as a whole on its way to a local disk or to S3.
        """
        self._files.write(self._path(name), memoryview(content).cast("B"))

    def put_if_absent(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Write a file atomically unless it exists; return whether this call wrote it.

        Of several processes that try, one succeeds. On filesystems without a conditional write this checks first, which
        leaves a short race. If `shared`, callers must pass different contents, by a random id for example: a retry
        whose first request was carried out, but not answered, recognises its own file by them.
        """
        return self._files.put_if_absent(self._path(name), memoryview(content).cast("B"))

    def set_deadline(self, seconds: float) -> None:
        """Let all operations on a remote storage, running and later ones, fail after this many seconds from now."""
        if isinstance(self._files, RemoteFiles):
            self._files.set_deadline(seconds)

    def size(self, name: str) -> int | None:
        """Return the bytes of the file, or None if there is none."""
        return self._files.size(self._path(name))

    def list(self) -> list[str]:
        """Return the names directly below this directory, sorted; empty if the directory does not exist."""
        return self._files.list(self.root)

    def delete(self, name: str) -> None:
        """Delete a file, or a directory with its contents, if there is one.

        A symbolic link is deleted, not its target. On S3, this also aborts unfinished multipart uploads below the name.
        """
        self._files.delete(self._path(name))


class LocalFiles:
    """The files of this machine, by path."""

    def read(self, path: str, limit: int | None, expected_size: int | None) -> bytes:
        with open_regular(Path(path)) as file:
            return file.read(min((size for size in (limit, expected_size) if size is not None), default=-1))

    def chunks(self, path: str, size: int, expected_size: int | None) -> Iterator[bytes]:
        with open_regular(Path(path)) as file:
            while chunk := file.read(size):
                yield chunk

    def write(self, path: str, content: memoryview) -> None:
        atomic_write(Path(path), content)

    def put_if_absent(self, path: str, content: memoryview) -> bool:
        return atomic_create(Path(path), content)

    def size(self, path: str) -> int | None:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading, without blocking on a named pipe.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: it is not a regular file, is larger or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content


def atomic_write(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a local file atomically: readers see the old content or the new, even after a power failure."""
    with _partial_file(path, content) as partial:
        os.replace(partial, path)


def atomic_create(path: Path, content: bytes | bytearray | memoryview) -> bool:
    """Write a local file atomically unless it exists; return whether this call wrote it."""
    with _partial_file(path, content) as partial:
        try:
            os.link(partial, path)
        except OSError:
            if os.path.lexists(path):
                return False
            os.replace(partial, path)  # a filesystem without hard links
    return True


@contextmanager
def _partial_file(path: Path, content: bytes | bytearray | memoryview) -> Iterator[Path]:
    """Write and fsync a temporary file next to `path`, which the caller renames; then fsync the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Fsync a local directory, so that the names in it are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
