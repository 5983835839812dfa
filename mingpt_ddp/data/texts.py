"""Texts as streams of bytes: a file, a directory, a glob, an archive, a URL, or a user's reader.

Archives come from strangers: nothing is extracted to the disk, names are labels only, and their
expansion is bounded.
"""

import codecs
import glob
import gzip
import io
import logging
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.config.registry import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.data.download import download, download_path, open_filesystem
from mingpt_ddp.errors import DataError

log = logging.getLogger(__name__)

BUILTIN = "builtin:python_docs"
CHUNK_BYTES = 1 << 18
MIN_EXPANDED_BYTES = 1 << 26  # which any compressed file may have
MAX_MEMBERS = 100_000  # of an archive
MAX_HEADER_BYTES = 1 << 20  # of a member of a tar archive
MAX_LOGGED = 10  # skipped files
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
OpenBytes: TypeAlias = Callable[[], io.BufferedReader]
Member: TypeAlias = tuple[str, Callable[[], Any]]  # a name, and a function that opens the bytes


def open_source(config: DataConfig, cache: Path, check: Callable[[Path], object]) -> OpenBytes:
    """Return a function that opens the text's bytes; download a remote file into the cache first.

    Args:
        check: called with a download before it is kept; raises to refuse it.

    Raises:
        DataError: there is no text at `data.path`.
    """
    if config.reader is not None:
        return partial(_stream, lambda: _read_pieces(config))
    if config.path == BUILTIN:
        content = python_docs().encode()
        return lambda: io.BufferedReader(io.BytesIO(content))
    target = download_path(config.path, cache)
    if target.exists() and config.sha256 and _accepts(check, target):
        return _open_file(config, str(target))
    fs, name, is_local = open_filesystem(config.path)
    if not is_local:
        download(fs, name, target, check)
        name = str(target)
    elif not os.path.exists(name) and glob.has_magic(name):
        return _joined_files(config, Path(), sorted(glob.glob(name, recursive=True)))
    elif os.path.isdir(name):
        if os.path.realpath(name) == os.sep:  # files without end, as in /proc
            raise DataError(
                f"data.path={config.path} is the root of the file system; name a directory of texts"
            )
        paths = []
        for at, _, files in os.walk(name):
            paths += [Path(at, file).relative_to(name).as_posix() for file in files]
        return _joined_files(config, Path(name), sorted(paths))
    elif os.path.exists(name) and not os.path.isfile(name):
        raise DataError(f"data.path={config.path} is not a regular file")
    return _open_file(config, name)


def _open_file(config: DataConfig, name: str) -> OpenBytes:
    """Return how to open a local file, or the members of an archive, as one stream."""
    kind = _archive(name)
    if kind is None:
        return opener(name)
    limit = expanded_limit(os.path.getsize(name), config.max_expansion)
    open_members = _zip_members if kind == "zip" else _tar_members
    return _joined(config.path, partial(open_members, name, limit), limit)


def expanded_limit(size: int, max_expansion: float) -> int:
    """Return how many bytes a compressed file of `size` bytes may expand to."""
    return max(MIN_EXPANDED_BYTES, int(max_expansion * size))


def expands_too_far(path: str, limit: int) -> DataError:
    return DataError(
        f"data.path={path} expands to over {limit:,} bytes; raise data.max_expansion if you "
        "trust it, or unpack it yourself"
    )


def opener(path: str | Path) -> OpenBytes:
    return lambda: open(path, "rb")


def python_docs() -> str:
    """Return the language reference that CPython's help() shows.

    It has 460,000 to 510,000 characters, by Python version.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class PiecesIO(io.RawIOBase):
    """Pieces of bytes as a stream that is never whole in memory."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")  # of the last piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raise what making the pieces raises."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        part = self._rest[: len(buffer)]
        self._rest = self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _stream(pieces: Callable[[], Iterator[bytes]]) -> io.BufferedReader:
    return io.BufferedReader(PiecesIO(pieces()), CHUNK_BYTES)


def _accepts(check: Callable[[Path], object], path: Path) -> bool:
    try:
        check(path)
    except DataError:
        return False
    return True


def _read_pieces(config: DataConfig) -> Iterator[bytes]:
    """Yield the pieces of a user's reader as UTF-8.

    Raises:
        CodeError: the reader raised an exception; names its line.
        DataError: the reader yields something other than text, or cannot read its source.
    """
    name = f"data.reader={config.reader}"
    with attribute_errors_to_user_code():
        try:
            for piece in BUILDERS["data"][str(config.reader)](config):
                try:
                    yield piece.encode()
                except (AttributeError, UnicodeEncodeError) as error:
                    raise DataError(f"{name} must yield text: {error}") from error
        except OSError as error:
            raise DataError(f"{name} cannot read data.path={config.path}: {error}") from error


# Several texts in one: sorted by name, a line feed after each that has none.


def _joined_files(config: DataConfig, root: Path, names: list[str]) -> OpenBytes:
    """Return a function that opens the files below `root` as one text; gzip is decompressed."""
    paths = {name: root / name for name in names if (root / name).is_file()}

    @contextmanager
    def members() -> Iterator[list[Member]]:
        yield [(name, partial(_unzipped, path)) for name, path in paths.items()]

    size = sum(path.stat().st_size for path in paths.values())
    return _joined(config.path, members, expanded_limit(size, config.max_expansion))


def _joined(path: str, members: Callable[[], Any], limit: int) -> OpenBytes:
    """Return a function that opens all texts as one.

    Hidden and binary files are skipped; the log names them once.

    Args:
        members: a context manager of the list of members.
        limit: bytes that all members may have.
    """
    skipped: set[str] = set()

    def skip(name: str, why: str) -> None:
        if name not in skipped and len(skipped) < MAX_LOGGED:
            log.warning("data.path=%s: skipped %.200r, which is %s", path, name, why)
            skipped.add(name)

    def pieces() -> Iterator[bytes]:
        total = 0
        found = False
        with _errors_of(path), members() as list_of_members:
            for name, open_member in sorted(list_of_members, key=lambda member: member[0]):
                if any(map(_is_hidden, name.split("/"))):
                    skip(name, "hidden")
                    continue
                with open_member() as file:
                    chunk = file.read(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
                    if not _is_text(chunk):
                        skip(name, "not UTF-8 text")
                        continue
                    while chunk:
                        found = True
                        total += len(chunk)
                        last = chunk[-1:]
                        if total > limit:
                            raise expands_too_far(path, limit)
                        yield chunk
                        chunk = file.read(CHUNK_BYTES)
                        if not chunk and last != b"\n":
                            yield b"\n"
        if not found:
            raise DataError(f"data.path={path} has no texts")

    return partial(_stream, pieces)


def _is_hidden(part: str) -> bool:
    return part not in (".", "..") and part.startswith((".", "__MACOSX"))


@contextmanager
def _errors_of(path: str) -> Iterator[None]:
    """Turn what a damaged archive raises into a DataError."""
    try:
        yield
    except UNPACKING_ERRORS as error:
        raise DataError(f"data.path={path} cannot be unpacked: {str(error)[:200]}") from error


def _is_text(chunk: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(chunk)
    except UnicodeDecodeError:
        return False
    return b"\0" not in chunk


# Archives.


def _head(path: str | Path, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def _unzipped(path: str | Path) -> Any:
    return gzip.open(path) if _head(path, 2) == GZIP else open(path, "rb")


def _archive(path: str) -> str | None:
    """Return zip or tar, by the content of a file; None: it is a text."""
    head = _head(path, 4)
    if head in ZIPS:
        return "zip"
    try:
        with _unzipped(path) as file:
            return "tar" if file.read(512)[257:262] == TAR else None
    except (OSError, EOFError, zlib.error):
        return None  # a damaged gzip file, which is reported when it is read


def _check_count(count: int) -> None:
    if count > MAX_MEMBERS:
        raise DataError(
            f"an archive may have {MAX_MEMBERS:,} files; unpack it and give the directory as "
            "data.path"
        )


@contextmanager
def _zip_members(path: str, limit: int) -> Iterator[list[Member]]:
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        _check_count(len(files))
        if any(info.compress_type not in ZIP_METHODS for info in files):
            raise NotImplementedError("members in bzip2 or LZMA are not read; unpack it yourself")
        yield [(info.filename, partial(archive.open, info)) for info in files]


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
def _tar_members(path: str, limit: int) -> Iterator[list[Member]]:
    """Open a tar archive; links, devices and directories are not texts."""
    with (
        _unzipped(path) as file,
        tarfile.open(fileobj=_BoundedReader(file, limit), mode="r:") as archive,
    ):
        files = []
        for info in archive:
            if info.isreg():
                files.append(info)
                _check_count(len(files))
        yield [(info.name, partial(archive.extractfile, info)) for info in files]
