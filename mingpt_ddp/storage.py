"""Files by name below one URL: local directories, memory:// and every other fsspec protocol alike."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import split_protocol

from mingpt_ddp.errors import ConfigError

EXTRAS = {"s3": "s3", "s3a": "s3"}  # protocol -> the extra of this package that brings it


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
    """A directory of small trees, addressed by relative names with forward slashes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        self.fs, self.root = fsspec.core.url_to_fs(self.url)
        self.local = _is_local(self.fs)

    def _at(self, name: str) -> str:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a name below {self.url}")
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def child(self, name: str) -> Storage:
        """The storage one directory further down."""
        self._at(name)
        return Storage(f"{self.url}/{name}")

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The whole file, or its first `limit` bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        content: bytes = self.fs.cat_file(self._at(name), end=limit)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Publish a file whole or not at all; on a local disk it has reached the disk when this returns."""
        path = self._at(name)
        if self.local:
            publish(Path(path), content)
        else:
            self.fs.pipe_file(path, content)

    def size(self, name: str) -> int | None:
        """Bytes of the file, or None where there is none."""
        try:
            return int(self.fs.info(self._at(name))["size"])
        except FileNotFoundError:
            return None

    def list(self) -> list[str]:
        """Names directly below this directory, sorted; empty where the directory does not exist."""
        self.fs.invalidate_cache(self.root)
        try:
            entries: list[Any] = self.fs.ls(self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def delete(self, name: str) -> None:
        """Remove a file or a directory with all that is in it; nothing happens where there is none."""
        path = self._at(name)
        if self.fs.exists(path):
            self.fs.rm(path, recursive=True)


def _is_local(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    return "file" in protocols


def publish(path: Path, content: bytes) -> None:
    """Write a local file atomically: readers see the old content or the new, also after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
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
