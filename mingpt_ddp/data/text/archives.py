"""Files in zip and tar archives, and compressed ones, by their content; nothing is extracted.

By the standard library: fsspec's filesystems would read the target of a link as one more text,
leave out absolute names, and list an archive of many directories in quadratic time.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mingpt_ddp.data.file_kinds import (
    COMPRESSED,
    HEAD_BYTES,
    HIDDEN,
    Kind,
    is_hidden,
    is_utf8,
    kind_of,
)
from mingpt_ddp.data.text.contents import Contents
from mingpt_ddp.errors import ConfigError, DataError, UserError

GZIP = b"\x1f\x8b"
ZIPS = (b"PK\x03\x04", b"PK\x05\x06")
TAR = b"ustar"
MIN_EXPANDED_BYTES = 1 << 26  # which any compressed file may have


@dataclass(frozen=True)
class Member:
    """A file of a directory or an archive."""

    name: str  # a label only
    size: int  # bytes, before decompression
    open: Callable[[], Any]


@dataclass(frozen=True)
class Files:
    """The files of a text: one, those of a directory or a glob, or the members of an archive.

    Attributes:
        paths: of local files by the names of members; that of an archive as "".
        limit: bytes that they may have, decompressed and as text.
        kinds: of the members of which the head has been read, by name and size, because an archive
            may have a name twice.
    """

    source: str  # for messages
    open_members: Callable[[], AbstractContextManager[list[Member]]]
    paths: dict[str, Path]
    limit: int
    is_one: bool = False
    kinds: dict[tuple[str, int], Kind] = field(default_factory=dict)

    @contextmanager
    def opened(self) -> Iterator[list[Member]]:
        """Open the files; what a damaged archive raises becomes a DataError."""
        try:
            with self.open_members() as members:
                yield members
        except (UserError, OSError):
            raise
        except Exception as error:  # zipfile and tarfile raise many kinds
            message = f"{self.source} cannot be unpacked: {str(error)[:200]}"
            raise DataError(message) from error

    def check_size(self, size: int) -> None:
        """Refuse a text that has expanded to too many bytes."""
        if size > self.limit:
            raise DataError(
                f"{self.source} expands to over {self.limit:,} bytes; raise data.max_expansion if "
                "you trust it, or unpack it yourself"
            )


def expanded_limit(size: int, max_expansion: float) -> int:
    """Return how many bytes a compressed file of `size` bytes may expand to."""
    return max(MIN_EXPANDED_BYTES, int(max_expansion * size))


def _head(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def unzipped(path: Path) -> Any:
    return gzip.open(path) if _head(path, 2) == GZIP else open(path, "rb")


def decompressed(file: Any) -> Any:
    """Return a buffered file as it is, or decompressed if it begins as a compressed one.

    Raises:
        ConfigError: pyarrow is needed for it, and not installed.
    """
    head = file.peek(10)
    names = [name for name, begin in COMPRESSED.items() if re.match(begin, head, re.DOTALL)]
    return io.BufferedReader(DECOMPRESSORS[names[0]](file), HEAD_BYTES) if names else file


def _all_streams(opened: Callable[[Any], Any], file: Any) -> Any:
    """Let a bad stream after a good one raise; the standard library takes it for the end."""
    decompressing = opened(file)
    decompressing._buffer.raw._trailing_error = ()
    return decompressing


def _zstd(file: Any) -> Any:
    """Return a zstd file, decompressed; other libraries take one that is cut off for a whole."""
    return import_pyarrow("zstd").CompressedInputStream(file, "zstd")


def import_pyarrow(what: str) -> Any:
    """Return the module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{what} needs pyarrow; pip install 'mingpt_ddp[data]'") from error
    return pyarrow


DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bzip2": partial(_all_streams, bz2.BZ2File),
    "xz": partial(_all_streams, lzma.LZMAFile),
    "zstd": _zstd,
}
DAMAGES = (OSError, EOFError, zlib.error, lzma.LZMAError)  # of compressed files


def text_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a text, decompressed.

    None of a damaged file: the damage is reported when it is read.
    """
    try:
        with open(path, "rb") as raw, decompressed(raw) as file:
            return bytes(file.read(size))
    except DAMAGES:
        return b""


def members_of(path: Path) -> Callable[[], AbstractContextManager[list[Member]]] | None:
    """Return what opens the files in an archive, by its content; None: it is a text."""
    if _head(path, 4) in ZIPS:
        return partial(_zip_members, path)
    if text_head(path, 512)[257:262] == TAR:
        return partial(_tar_members, path)
    return None


@contextmanager
def _zip_members(path: Path) -> Iterator[list[Member]]:
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        yield [Member(info.filename, info.file_size, partial(archive.open, info)) for info in files]


@contextmanager
def _tar_members(path: Path) -> Iterator[list[Member]]:
    """Open a tar archive; links, devices and directories are not texts."""
    with (
        open(path, "rb") as raw,
        decompressed(raw) as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        files = [info for info in archive if info.isreg()]
        yield [Member(info.name, info.size, partial(archive.extractfile, info)) for info in files]


def pieces_of(member: Member, format: str, contents: Contents, ends_line: bool) -> Iterator[bytes]:
    """Yield the bytes of a text; nothing of what is no text.

    Args:
        format: as data.format.
        ends_line: add a line feed to a text that has none at its end.
    """
    if is_hidden(member.name):
        contents.skip(member.name, member.size, HIDDEN)
        return
    with member.open() as file:
        head = file.read(HEAD_BYTES)
        kind = kind_of(head)
        if kind is not None and (format == "auto" or not is_utf8(head)):
            contents.skip(member.name, member.size, kind)
            return
        chunk = head.removeprefix(codecs.BOM_UTF8)
        while chunk:
            last = chunk[-1:]
            yield chunk
            chunk = file.read(HEAD_BYTES)
            if not chunk and ends_line and last != b"\n":
                yield b"\n"
