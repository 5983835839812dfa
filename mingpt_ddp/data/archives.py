"""Files in zip and tar archives, and in gzip, recognized by content.

Archives come from strangers: nothing is extracted to the disk, names are labels only, and their
expansion is bounded.
"""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import DataError

MAX_MEMBERS = 100_000  # of an archive
MAX_HEADER_BYTES = 1 << 20  # of a member of a tar archive
GZIP = b"\x1f\x8b"
ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
TAR = b"ustar"
UNPACKING_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    RuntimeError,
    NotImplementedError,
    # from damaged numbers in the headers of an archive
    ValueError,
    LookupError,
    OverflowError,
    TypeError,
    struct.error,
)


@dataclass(frozen=True)
class Member:
    """A file of a directory or an archive."""

    name: str
    size: int  # bytes, before decompression
    open: Callable[[], Any]


def _head(path: str | Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def unzipped(path: str | Path) -> Any:
    return gzip.open(path) if _head(path, 2) == GZIP else open(path, "rb")


def archive_kind(path: str) -> str | None:
    """Return zip or tar, by the content of a file; None: it is a text."""
    head = _head(path, 4)
    if head in ZIPS:
        return "zip"
    return "tar" if text_head(path, 512)[257:262] == TAR else None


def text_head(path: str, size: int) -> bytes:
    """Return the first bytes of a text, decompressed.

    None of a damaged gzip file: the damage is reported when it is read.
    """
    try:
        with unzipped(path) as file:
            return bytes(file.read(size))
    except (OSError, EOFError, zlib.error):
        return b""


def _check_count(count: int) -> None:
    if count > MAX_MEMBERS:
        raise DataError(
            f"an archive may have {MAX_MEMBERS:,} files; unpack it and name the directory"
        )


@contextmanager
def zip_members(path: str, limit: int) -> Iterator[list[Member]]:
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        _check_count(len(files))
        if any(info.compress_type not in ZIP_METHODS for info in files):
            raise NotImplementedError("members in bzip2 or LZMA are not read; unpack it yourself")
        yield [Member(info.filename, info.file_size, partial(archive.open, info)) for info in files]


class _BoundedReader(io.RawIOBase):
    """The bytes of a tar archive: large headers, and more than `limit` bytes, are refused."""

    def __init__(self, file: Any, limit: int) -> None:
        self._file = file
        self._limit = limit

    def read(self, size: int = -1) -> bytes:
        self._check(0 <= size <= MAX_HEADER_BYTES and self._file.tell() <= self._limit)
        return bytes(self._file.read(size))

    def _check(self, fits: bool) -> None:
        if not fits:
            raise tarfile.ReadError(
                "it expands too far; raise data.max_expansion if you trust it, or unpack it "
                "yourself"
            )

    def seek(self, offset: int, whence: int = 0) -> int:
        self._check(offset <= self._limit)
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())


@contextmanager
def tar_members(path: str, limit: int) -> Iterator[list[Member]]:
    """Open a tar archive; links, devices and directories are not texts."""
    with (
        unzipped(path) as file,
        tarfile.open(fileobj=_BoundedReader(file, limit), mode="r:") as archive,
    ):
        files = []
        for info in archive:
            if info.isreg():
                files.append(info)
                _check_count(len(files))
        yield [Member(info.name, info.size, partial(archive.extractfile, info)) for info in files]
