"""Files by name below one URL: local directories, memory:// and every other fsspec protocol alike."""

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
from mingpt_ddp.storage.remote import RemoteFiles, StorageError
from mingpt_ddp.storage.s3 import S3Files

__all__ = [
    "Storage",
    "StorageError",
    "atomic_create",
    "atomic_write",
    "check_url",
    "open_regular",
    "read_regular",
    "sync_directory",
]

S3 = ("s3", "s3a")
# Endpoint, credentials and region come from the environment and files that all AWS tools read. Retries are ours.
S3_OPTIONS: dict[str, Any] = {"config_kwargs": {"retries": {"max_attempts": 0}}}
EXTRAS = dict.fromkeys(S3, "s3")  # protocol -> the extra of this package that brings it
READ_ONLY = ("http", "https")


def check_url(url: str, key: str, writable: bool = False) -> None:
    """Refuse a URL whose protocol fsspec does not know, whose package is not installed, or that cannot be written to.

    Raises:
        ConfigError: naming `key`, the configuration's name of the URL.
    """
    for part in url.split("::"):
        protocol = split_protocol(part)[0] or "file"
        if writable and protocol in READ_ONLY:
            raise ConfigError(
                f"{key}={url}: nothing can be written to {protocol}://; use a directory or an object store"
            )
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise ConfigError(f"{key}={url}: no such protocol as {protocol}://") from error
        except ImportError as error:
            extra = EXTRAS.get(protocol)
            package = f"mingpt_ddp[{extra}]" if extra else f"fsspec[{protocol}]"
            raise ConfigError(f"{key}={url}: {protocol}:// is not installed; pip install '{package}'") from error


class Storage:
    """A directory of small trees, addressed by relative names with forward slashes.

    On a local disk all methods raise OSError. Anywhere else they try again what may pass, end within the limits of
    `remote`, and raise StorageError: one line that names the URL and the cause. No method makes a bucket.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        base = split_protocol(self.url.rsplit("::", 1)[-1])[0] or "file"
        options = S3_OPTIONS if split_protocol(self.url)[0] in S3 else {}
        # An instance of our own, whose listings nobody else fills.
        fs, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **options)
        self.shared = base not in ("file", "local", "memory")  # all machines see the same files
        self.local = isinstance(fs, LocalFileSystem)  # the operating system can lock them
        self._files: LocalFiles | RemoteFiles
        if self.local:
            self._files = LocalFiles()
        else:
            self._files = (S3Files if options else RemoteFiles)(fs, self.url)

    def _at(self, name: str) -> str:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a name below {self.url}")
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def read(self, name: str, limit: int | None = None, expected_size: int | None = None) -> bytes:
        """The whole file, or its first `limit` bytes.

        Args:
            expected_size: bytes of the file, as `size` has just told: a remote storage is not asked again.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._files.read(self._at(name), limit, expected_size)

    def chunks(self, name: str, size: int = 1 << 23, expected_size: int | None = None) -> Iterator[bytes]:
        """The file in pieces of `size` bytes, of which one is in memory at a time; an empty file has none.

        Args:
            expected_size: as of `read`.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._files.chunks(self._at(name), size, expected_size)

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Publish a file whole or not at all; on a local disk it has reached the disk when this returns.

        A large content is never copied as a whole on its way to a local disk or to S3.
        """
        self._files.write(self._at(name), memoryview(content).cast("B"))

    def put_if_absent(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Publish a file unless there is one of this name; whether this call did.

        Of several processes that try, one succeeds. Filesystems that cannot refuse to overwrite are asked first, which
        leaves a moment for a race. Where `shared`, contents must differ between callers, by a random word for example:
        it is how a call whose request was carried out without an answer knows its own file.
        """
        return self._files.put_if_absent(self._at(name), memoryview(content).cast("B"))

    def set_deadline(self, seconds: float) -> None:
        """From then on a remote storage is not waited for any more: what is not done fails."""
        if isinstance(self._files, RemoteFiles):
            self._files.set_deadline(seconds)

    def size(self, name: str) -> int | None:
        """Bytes of the file, or None where there is none."""
        return self._files.size(self._at(name))

    def list(self) -> list[str]:
        """Names directly below this directory, sorted; empty where the directory does not exist."""
        return self._files.list(self.root)

    def delete(self, name: str) -> None:
        """Remove a file or a directory with all that is in it; nothing happens where there is none.

        A symbolic link is removed, not what it leads to. On S3, parts of uploads below the name that were never
        completed go too.
        """
        self._files.delete(self._at(name))


class LocalFiles:
    """The files of this machine, by path."""

    def read(self, path: str, limit: int | None, expected_size: int | None) -> bytes:
        with open_regular(Path(path)) as file:
            return file.read(min((most for most in (limit, expected_size) if most is not None), default=-1))

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
    """Open a file that may be anybody's.

    Raises:
        OSError: it is no regular file (a pipe would never end) or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a small file, which may be anybody's.

    Raises:
        OSError: it is no regular file, is larger than `limit` bytes or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content


def atomic_write(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Write a local file atomically: readers see the old content or the new, also after a power failure."""
    with _beside(path, content) as partial:
        os.replace(partial, path)


def atomic_create(path: Path, content: bytes | bytearray | memoryview) -> bool:
    """As `publish`, but an existing file stays as it is; whether this call made the file."""
    with _beside(path, content) as partial:
        try:
            os.link(partial, path)
        except OSError:
            if os.path.lexists(path):
                return False
            os.replace(partial, path)  # a filesystem without hard links
    return True


@contextmanager
def _beside(path: Path, content: bytes | bytearray | memoryview) -> Iterator[Path]:
    """A file next to `path` with this content, on the disk and for the caller to rename; then, its name is too."""
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
    """Make the names in a local directory durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
