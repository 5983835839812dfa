"""Read files of token ids, memory-mapped in place.

A file may have the header of llm.c or of .npy, or no header.
"""

import os
import re
from dataclasses import dataclass, replace

import fsspec
import numpy as np

from mingpt_ddp.data.file_kinds import CONTROLS, MAGIC_PATTERNS, Kind, is_utf8
from mingpt_ddp.data.rng import Ints
from mingpt_ddp.errors import DataError

TOKEN_SUFFIXES = (".bin", ".npy")  # a directory's files with these suffixes hold tokens
NPY_MAGIC = b"\x93NUMPY"
NPY_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
# The header of llm.c and modded-nanogpt is 256 numbers of int32. The first three are a magic
# number, a version and the number of tokens.
HEADER = np.dtype("int32")
HEADER_BYTES = 256 * HEADER.itemsize
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # version and type by magic number
# Patterns of the first bytes of files that do not hold tokens, by format.
NON_TOKEN_PATTERNS = MAGIC_PATTERNS | {Kind("gzip", "decompress it first"): rb"\x1f\x8b\x08"}
HEAD_BYTES = 1 << 12  # read this much of each file to check it: there may be thousands of files
SCANNED_TOKENS = 1 << 22  # number of tokens to check in one call


@dataclass(frozen=True)
class TokenFile:
    """Consecutive tokens of a file.

    Attributes:
        path: Path of the file.
        dtype: Type of a token.
        offset: Number of bytes in the file before the first of these tokens.
        length: Number of tokens.
    """

    path: str
    dtype: str
    offset: int
    length: int

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def memmap(self) -> Ints:
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.length)

    def cut(self, begin: int, end: int) -> "TokenFile":
        """Return the tokens begin .. end - 1 of these tokens, in the same file."""
        offset = self.offset + begin * self.itemsize
        return replace(self, offset=offset, length=end - begin)


@dataclass(frozen=True)
class LargestId:
    """The largest token id in files, and its first occurrence.

    Attributes:
        id: The token id. Negative ids count as numbers above all others.
        file: Index of the file.
        position: Index of the token in the file.
    """

    id: int
    file: int
    position: int


def cut(files: list[TokenFile], begin: int, end: int) -> list[TokenFile]:
    """Select the tokens begin .. end - 1 of files, counted over all files in their order."""
    parts = []
    position = 0
    for file in files:
        inside = max(0, begin - position), min(file.length, end - position)
        if inside[0] < inside[1]:
            parts.append(file.cut(*inside))
        position += file.length
    return parts


def find_tokens(paths: list[str], source: str, dtype: str | None) -> list[TokenFile]:
    """Check the headers and sizes of token files, and find the tokens in each.

    Args:
        paths: Paths of the files, in the order of their tokens.
        source: Name of the text in messages.
        dtype: The setting `data.dtype`. None takes the type from the headers.

    Raises:
        DataError: A file has no tokens, or the type of its tokens is unknown or is not
            `data.dtype`.
    """
    files: list[TokenFile] = []
    for path in paths:
        name = source if len(paths) == 1 else f"{source}: {path}"
        files.append(_read(path, name, dtype))
    return files


def _read(path: str, name: str, dtype: str | None) -> TokenFile:
    """Find the tokens of a file by its first bytes.

    Args:
        path: Path of the file.
        name: Name of the file in messages.
        dtype: The setting `data.dtype`. None takes the type from the header.
    """
    compression = fsspec.utils.infer_compression(name)
    if compression is not None:
        raise DataError(
            f"{name} is compressed ({compression}) and cannot be mapped to memory; decompress it"
        )
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NPY_MAGIC):
        token_file = _npy_tokens(path, name)
    elif known := _header(head, name):
        token_file = replace(known, path=path)
    elif dtype is None:
        raise DataError(
            f"{name} has no header that names the type of its tokens; give data.dtype=uint16 "
            "(nanoGPT) or uint32"
        )
    else:
        _check_head(head, path, name, dtype)
        itemsize = np.dtype(dtype).itemsize
        if size % itemsize:
            raise DataError(
                f"{name} has {size:,} bytes, which is not a multiple of {itemsize}, the size of "
                f"data.dtype={dtype}; if it is cut off, copy it again, else set data.dtype to the "
                "type of its tokens"
            )
        token_file = TokenFile(path, dtype, 0, size // itemsize)
    if dtype not in (None, token_file.dtype):
        raise DataError(
            f"{name} has tokens of {token_file.dtype}, not data.dtype={dtype}; leave data.dtype out"
        )
    expected = token_file.offset + token_file.length * token_file.itemsize
    if size != expected:
        raise DataError(
            f"{name} has {size:,} bytes, but {expected:,} according to its header; it is cut off "
            "or damaged: copy it again"
        )
    if token_file.length == 0:
        raise DataError(f"{name} has no tokens; leave the file out")
    return token_file


def _check_head(head: bytes, path: str, name: str, dtype: str) -> None:
    """Refuse a file that does not look like headerless tokens of this type.

    Raises:
        DataError: The file looks like text, another format, or tokens of uint32 read as uint16.
    """
    has_controls = len(head.translate(None, CONTROLS)) < len(head)
    if head and is_utf8(head) and not has_controls:
        raise DataError(f"{name} looks like text, not tokens; leave data.format out")
    for kind, pattern in NON_TOKEN_PATTERNS.items():
        if re.match(pattern, head, re.DOTALL):
            raise kind.refusal(name, path, "tokens")
    if dtype == "uint16" and len(head) == HEAD_BYTES:
        tokens = np.frombuffer(head, dtype)
        if tokens[::2].any() and not tokens[1::2].any():
            raise DataError(
                f"{name} looks like tokens of uint32, not data.dtype=uint16; set data.dtype=uint32"
            )


def _npy_tokens(path: str, name: str) -> TokenFile:
    """Find the tokens of a .npy file by its header."""
    try:
        # open_memmap refuses arrays of objects, so nothing is unpickled.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{name} cannot be read as a NumPy array: {reason}") from error
    native = [np.dtype(dtype) for dtype in NPY_TYPES]
    if tokens.ndim != 1 or tokens.dtype not in native:
        raise DataError(
            f"{name} has an array of {tokens.dtype} in {tokens.ndim} dimensions; save it in one "
            f"dimension, as one of {', '.join(NPY_TYPES)}"
        )
    return TokenFile(path, str(tokens.dtype), tokens.offset, len(tokens))


def _header(head: bytes, name: str) -> TokenFile | None:
    """Read the header of llm.c, if the file has one.

    Returns:
        The tokens that the header describes, without their path. None if there is no such header.

    Raises:
        DataError: The header has an unknown version, or a negative number of tokens.
    """
    if len(head) < HEADER_BYTES:
        return None
    magic, version, length = np.frombuffer(head, HEADER, count=3).tolist()
    if magic not in HEADERS:
        return None
    known, dtype = HEADERS[magic]
    if version != known or length < 0:
        raise DataError(
            f"{name} has a header of version {version} with {length} tokens, which cannot be read; "
            f"write version {known}"
        )
    return TokenFile("", dtype, HEADER_BYTES, length)


def find_largest(files: list[TokenFile]) -> LargestId:
    """Read all tokens of files, and find the largest id."""
    largest = LargestId(-1, 0, 0)
    for index, file in enumerate(files):
        unsigned = np.dtype(f"u{file.itemsize}")
        for begin in range(0, file.length, SCANNED_TOKENS):
            part = file.cut(begin, min(begin + SCANNED_TOKENS, file.length))
            # Read the file, because the pages of a memory map would count as this process's memory.
            tokens = np.fromfile(part.path, unsigned, part.length, offset=part.offset)
            position = int(tokens.argmax())
            token = int(tokens[position])
            if token > largest.id:
                largest = LargestId(token, index, begin + position)
    return largest
