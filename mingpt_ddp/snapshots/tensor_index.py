"""Find tensors in safetensors files, and read some or all of their rows.

A file holds a whole tensor, or one piece of a tensor if several ranks have each written some of its
rows. A piece is stored as a safetensors tensor named `<tensor>@<first row>-of-<rows>`, where
<rows> is the number of rows of the whole tensor. Rows are consecutive bytes in a file. A rank can
therefore read the rows it needs from whole tensors, or from pieces written by any number of ranks.

Headers are untrusted. torch is imported only when rows are read, because that takes a second.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mingpt_ddp.distributed.device.machine import usable_memory
from mingpt_ddp.snapshots.format import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from torch import Tensor

# The entry of each tensor, as JSON values: [type, shape, [[rows, file, offset], ...]]. The last
# list has one item for each piece: its number of rows, its file, and its first byte in the file.
# A scalar counts as one row.
Index: TypeAlias = dict[str, list[Any]]
# Reads a part of a file. Takes the name of the file, the number of bytes, and the first byte.
ReadChunks: TypeAlias = Callable[[str, int, int], Iterable[bytes | memoryview]]

PIECE_NAME = re.compile(r"(.+)@([0-9]{1,15})-of-([0-9]{1,15})", flags=re.DOTALL)
# Code of a type in a header -> name of the type in torch, bytes per element.
HEADER_TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "BOOL": ("bool", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
}


@dataclass(frozen=True)
class TensorEntry:
    """The entry of a tensor in the header of a file."""

    dtype: str  # name of the type in torch
    shape: list[int]
    offset: int  # bytes from the start of the file

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


Header: TypeAlias = dict[str, TensorEntry]


@dataclass(frozen=True)
class TensorPiece:
    """Rows of a tensor in one file. These may be all rows of the tensor."""

    first_row: int  # position of the piece's first row in the tensor
    total_rows: int  # number of rows of the whole tensor
    entry: TensorEntry
    file: str


def header_end(start: bytes, size: int) -> int:
    """Return the number of bytes that `read_header` needs from the start of a file.

    Args:
        start: At least the first eight bytes of the file.
        size: Size of the file in bytes.
    """
    return min(size, 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES))


def read_header(start: bytes, size: int) -> Header:
    """Parse the untrusted header of a safetensors file. Return its entries by tensor.

    Args:
        start: The start of the file, which includes the whole header.
        size: Size of the file in bytes.

    Raises:
        ValueError: The header is damaged, or the tensors in it overlap or do not fill the file.
    """
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError("its header is too large")
    entries = {}
    done = 0
    try:
        header = json.loads(start[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            kind = str(tensor["dtype"])
            if kind not in HEADER_TYPES:
                raise ValueError(f"{name[:100]} has the unknown type {kind[:20]}")
            dtype, width = HEADER_TYPES[kind]
            shape = tensor["shape"]
            begin, end = tensor["data_offsets"]
            are_counts = all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape))
            if not are_counts or begin != done:
                raise ValueError(f"{name[:100]} does not begin where the tensor before it ends")
            if end - begin != math.prod(shape) * width:
                raise ValueError(f"{name[:100]} has a size that does not fit its shape")
            entries[name] = TensorEntry(dtype, shape, 8 + length + begin)
            done = end
        if done != size - 8 - length:
            raise ValueError("its tensors do not fill the file")
    except Exception as error:  # an invalid header may raise any exception
        raise ValueError(str(error)) from error
    return entries


def make_index(headers: Mapping[str, Header]) -> Index:
    """Build the index of some files: the position of each tensor, or of each of its pieces.

    Args:
        headers: Headers of the files that hold one kind of tensors, by file name.

    Raises:
        ValueError: The pieces of a tensor do not make up the whole tensor, or a tensor is in two
            files.
    """
    pieces: dict[str, list[TensorPiece]] = defaultdict(list)
    seen: set[str] = set()
    for file, header in headers.items():
        for name, entry in header.items():
            if name in seen:
                raise ValueError(f"{name[:100]} is in two files")
            seen.add(name)
            match = PIECE_NAME.fullmatch(name)
            if match is None:
                pieces[name].append(TensorPiece(0, entry.rows, entry, file))
            else:
                pieces[match[1]].append(TensorPiece(int(match[2]), int(match[3]), entry, file))
    index = {}
    for name, tensor_pieces in pieces.items():
        # A tensor that is stored whole, under its own name, has nothing to check.
        if name not in seen or len(tensor_pieces) > 1:
            tensor_pieces.sort(key=lambda piece: piece.first_row)
            _check_pieces(name, tensor_pieces)
        first_piece = tensor_pieces[0]
        shape = first_piece.entry.shape
        if shape:
            shape = [first_piece.total_rows, *shape[1:]]
        locations = [[piece.entry.rows, piece.file, piece.entry.offset] for piece in tensor_pieces]
        index[name] = [first_piece.entry.dtype, shape, locations]
    return index


def _check_pieces(name: str, pieces: Sequence[TensorPiece]) -> None:
    """Check that the pieces of a tensor make up the whole tensor.

    Args:
        pieces: The pieces, sorted by their first rows.

    Raises:
        ValueError: Pieces overlap, are missing or do not fit each other.
    """
    first_piece = pieces[0]
    done = 0  # number of rows in the pieces checked so far
    for piece in pieces:
        shape = piece.entry.shape
        fits = (
            piece.first_row == done
            and piece.total_rows == first_piece.total_rows
            and piece.entry.dtype == first_piece.entry.dtype
            and shape  # not a scalar
            and shape[0] >= 1
            and shape[1:] == first_piece.entry.shape[1:]
        )
        if not fits:
            raise ValueError(f"the pieces of {name[:100]} do not fit each other at row {done}")
        done += shape[0]
    if done != first_piece.total_rows:
        raise ValueError(
            f"the pieces of {name[:100]} have only {done} of {first_piece.total_rows} rows"
        )


def read_rows(
    chunks: ReadChunks, entry: list[Any], first: int = 0, end: int | None = None
) -> Tensor:
    """Read rows of a tensor: row `first` and the following ones before row `end`.

    By default, read all rows. Reading takes no more memory than the rows that are read.

    Args:
        chunks: Reads a part of a file.
        entry: The entry of the tensor in an index.

    Raises:
        OSError: A file has fewer bytes than the index says.
        RuntimeError: The tensor is too large.
    """
    import torch

    type_name, shape, locations = entry
    dtype = getattr(torch, type_name)
    if end is None:
        end = shape[0] if shape else 1
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    tensor = torch.empty([end - first, *shape[1:]] if shape else [], dtype=dtype)
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    done = 0  # number of bytes read so far
    piece_row = 0  # position of the piece's first row in the tensor
    for rows, file, offset in locations:
        begin = max(first, piece_row)
        stop = min(end, piece_row + rows)
        if begin < stop and row_bytes:
            size = (stop - begin) * row_bytes
            start = offset + (begin - piece_row) * row_bytes
            for chunk in chunks(file, size, start):
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        piece_row += rows
    if done != len(content):
        raise OSError(f"{locations[0][1]} has changed while it was read")
    return tensor


def check_memory(what: str, size: int) -> None:
    """Check that this machine has enough memory to read and decode files.

    Args:
        what: Name of the files in the error message.
        size: Size of all files together in bytes.

    Raises:
        MemoryError: The files are too large.
    """
    # While the files are decoded, they are in memory both as bytes and as tensors.
    if 2 * size > usable_memory():
        raise MemoryError(f"{what} is larger than the memory")


def decode(contents: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Decode safetensors files that are in memory. Return the tensors in all of them, by name.

    Args:
        contents: The contents of the files, by file name.

    Raises:
        ValueError, RuntimeError: A file is not a safetensors file, or a piece of a tensor is
            missing.
    """
    headers = {name: read_header(content, len(content)) for name, content in contents.items()}

    def chunks(file: str, size: int, start: int) -> Iterable[memoryview]:
        return [memoryview(contents[file])[start : start + size]]

    return {name: read_rows(chunks, entry) for name, entry in make_index(headers).items()}
