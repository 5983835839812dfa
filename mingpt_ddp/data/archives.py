"""Files in zip and tar archives, and in gzip, recognized by content; nothing is extracted.

By the standard library: fsspec's filesystems would read the target of a link as one more text,
leave out absolute names, and list an archive of many directories in quadratic time.
"""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

GZIP = b"\x1f\x8b"
ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
TAR = b"ustar"


@dataclass(frozen=True)
class Member:
    """A file of a directory or an archive."""

    name: str  # a label only
    size: int  # bytes, before decompression
    open: Callable[[], Any]


def _head(path: str | Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def unzipped(path: str | Path) -> Any:
    return gzip.open(path) if _head(path, 2) == GZIP else open(path, "rb")


def text_head(path: str, size: int) -> bytes:
    """Return the first bytes of a text, decompressed.

    None of a damaged gzip file: the damage is reported when it is read.
    """
    try:
        with unzipped(path) as file:
            return bytes(file.read(size))
    except (OSError, EOFError, zlib.error):
        return b""


def members_of(path: str) -> Callable[[], AbstractContextManager[list[Member]]] | None:
    """Return what opens the files in an archive, by its content; None: it is a text."""
    if _head(path, 4) in ZIPS:
        return partial(_zip_members, path)
    if text_head(path, 512)[257:262] == TAR:
        return partial(_tar_members, path)
    return None


@contextmanager
def _zip_members(path: str) -> Iterator[list[Member]]:
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        yield [Member(info.filename, info.file_size, partial(archive.open, info)) for info in files]


@contextmanager
def _tar_members(path: str) -> Iterator[list[Member]]:
    """Open a tar archive; links, devices and directories are not texts."""
    with unzipped(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        files = [info for info in archive if info.isreg()]
        yield [Member(info.name, info.size, partial(archive.extractfile, info)) for info in files]
