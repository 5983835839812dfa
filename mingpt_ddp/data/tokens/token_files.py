"""Files of token ids, memory-mapped where they lie: headerless, with llm.c's header, or .npy."""

import os
import re
from dataclasses import dataclass, replace

import fsspec
import numpy as np

from mingpt_ddp.data.file_kinds import CONTROLS, FORMATS, Kind, is_utf8
from mingpt_ddp.data.rng import Ints
from mingpt_ddp.errors import DataError

TOKEN_SUFFIXES = (".bin", ".npy")  # of the files of a directory that have tokens
NPY = b"\x93NUMPY"
NPY_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
# llm.c and modded-nanogpt begin with 256 of int32: a magic number, a version, the number of tokens
HEADER = np.dtype("int32")
HEADER_BYTES = 256 * HEADER.itemsize
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # version and type by magic number
NO_TOKENS = FORMATS | {Kind("gzip", "decompress it first"): rb"\x1f\x8b\x08"}
HEAD_BYTES = 1 << 12  # of a file, which are looked at: there may be thousands of files
SCANNED = 1 << 22  # tokens looked at together


@dataclass(frozen=True)
class TokenFile:
    """Consecutive tokens of a file."""

    path: str
    dtype: str
    offset: int  # bytes before the first token
    length: int  # tokens

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def memmap(self) -> Ints:
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.length)

    def cut(self, begin: int, end: int) -> "TokenFile":
        """Return the tokens begin .. end - 1."""
        offset = self.offset + begin * self.itemsize
        return replace(self, offset=offset, length=end - begin)


@dataclass(frozen=True)
class Largest:
    """The largest token id of files; a negative one counts as a number beyond all ids."""

    id: int
    file: int  # its index
    position: int  # in the file, of the first that is so large


def cut(files: list[TokenFile], begin: int, end: int) -> list[TokenFile]:
    """Return the tokens begin .. end - 1 of files that follow each other."""
    parts = []
    position = 0
    for file in files:
        inside = max(0, begin - position), min(file.length, end - position)
        if inside[0] < inside[1]:
            parts.append(file.cut(*inside))
        position += file.length
    return parts


def find_tokens(paths: list[str], source: str, dtype: str | None) -> list[TokenFile]:
    """Find the tokens of files that follow each other.

    Args:
        dtype: `data.dtype`.

    Raises:
        DataError: one has none, or their type is unknown or is not `data.dtype`.
    """
    files: list[TokenFile] = []
    for path in paths:
        name = source if len(paths) == 1 else f"{source}: {path}"
        files.append(_read(path, name, dtype))
    return files


def _read(path: str, name: str, dtype: str | None) -> TokenFile:
    """Find the tokens of a file by its first bytes.

    Args:
        name: of the file, for messages.
        dtype: `data.dtype`.
    """
    compression = fsspec.utils.infer_compression(name)
    if compression is not None:
        raise DataError(f"{name} is compressed ({compression}); decompress it, to map it to memory")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NPY):
        token_file = _npy_tokens(path, name)
    elif known := _header(head, name):
        token_file = replace(known, path=path)
    elif dtype is None:
        raise DataError(
            f"{name} has no header that says of which type its tokens are; give "
            "data.dtype=uint16 (nanoGPT) or uint32"
        )
    else:
        _check_head(head, path, name, dtype)
        itemsize = np.dtype(dtype).itemsize
        if size % itemsize:
            raise DataError(
                f"{name} has {size:,} bytes, no multiple of the {itemsize} of "
                f"data.dtype={dtype}; it is cut off, or of another type"
            )
        token_file = TokenFile(path, dtype, 0, size // itemsize)
    if dtype not in (None, token_file.dtype):
        raise DataError(f"{name} has tokens of {token_file.dtype}, not data.dtype={dtype}")
    expected = token_file.offset + token_file.length * token_file.itemsize
    if size != expected:
        raise DataError(
            f"{name} has {size:,} bytes, and {expected:,} by its header; it is cut off or damaged"
        )
    if token_file.length == 0:
        raise DataError(f"{name} has no tokens")
    return token_file


def _check_head(head: bytes, path: str, name: str, dtype: str) -> None:
    """Refuse what is no headerless file of tokens of a type."""
    has_controls = len(head.translate(None, CONTROLS)) < len(head)
    if head and is_utf8(head) and not has_controls:
        raise DataError(f"{name} looks like text, not tokens; leave data.format out")
    for kind, pattern in NO_TOKENS.items():
        if re.match(pattern, head, re.DOTALL):
            raise kind.refusal(name, path, "tokens")
    if dtype == "uint16" and len(head) == HEAD_BYTES:
        tokens = np.frombuffer(head, dtype)
        if tokens[::2].any() and not tokens[1::2].any():
            raise DataError(f"{name} looks like tokens of uint32, not data.dtype=uint16")


def _npy_tokens(path: str, name: str) -> TokenFile:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")  # of no objects, so without pickle
    except (OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} cannot be read as an array of NumPy: {reason}") from error
    native = [np.dtype(dtype) for dtype in NPY_TYPES]
    if tokens.ndim != 1 or tokens.dtype not in native:
        raise DataError(
            f"{name} has an array of {tokens.dtype} in {tokens.ndim} dimensions; save one of "
            f"{', '.join(NPY_TYPES)} in one dimension"
        )
    return TokenFile(path, str(tokens.dtype), tokens.offset, len(tokens))


def _header(head: bytes, name: str) -> TokenFile | None:
    """Return what a header says of the tokens, without the path; None: there is none."""
    if len(head) < HEADER_BYTES:
        return None
    magic, version, length = np.frombuffer(head, HEADER, count=3).tolist()
    if magic not in HEADERS:
        return None
    known, dtype = HEADERS[magic]
    if version != known or length < 0:
        raise DataError(
            f"{name} has a header of version {version} with {length} tokens; write version {known}"
        )
    return TokenFile("", dtype, HEADER_BYTES, length)


def find_largest(files: list[TokenFile]) -> Largest:
    largest = Largest(-1, 0, 0)
    for index, file in enumerate(files):
        unsigned = np.dtype(f"u{file.itemsize}")
        for begin in range(0, file.length, SCANNED):
            part = file.cut(begin, min(begin + SCANNED, file.length))
            # pages of a memory map would count as this process's memory
            tokens = np.fromfile(part.path, unsigned, part.length, offset=part.offset)
            position = int(tokens.argmax())
            token = int(tokens[position])
            if token > largest.id:
                largest = Largest(token, index, begin + position)
    return largest
