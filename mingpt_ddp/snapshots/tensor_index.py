"""Find tensors in safetensors files, and read rows of them.

A tensor is whole in one file, or several ranks have written pieces of it. A piece is some rows,
stored as a safetensors tensor named `<tensor>@<first row>-of-<rows>`. Rows are consecutive bytes:
any number of ranks can read its rows from whole tensors, and from pieces of other sizes.

Headers are untrusted. Only reading rows imports torch, which takes a second.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mingpt_ddp.distributed.device.machine import installed_memory
from mingpt_ddp.snapshots.format import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from torch import Tensor

# Entries by tensor, as JSON values: [type, shape, [[rows, file, offset], ...]].
# A scalar has one row.
Index: TypeAlias = dict[str, list[Any]]
Chunks: TypeAlias = Callable[[str, int, int], Iterable[bytes | memoryview]]  # file, size, start

PIECE = re.compile(r"(.+)@([0-9]{1,15})-of-([0-9]{1,15})", flags=re.DOTALL)
TYPES = {  # type in a header: torch's name, bytes of an element
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

    dtype: str  # torch's name of the type
    shape: list[int]
    offset: int  # bytes from the start of the file

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


Header: TypeAlias = dict[str, TensorEntry]


@dataclass(frozen=True)
class TensorPiece:
    """Rows of a tensor in one file. They may be all rows."""

    first: int  # first row of the piece, in the tensor
    total: int  # number of rows of the tensor
    entry: TensorEntry
    file: str


def header_end(start: bytes, size: int) -> int:
    """Return the number of bytes at the start of a file that `read_header` needs.

    Args:
        start: The first eight bytes, or more.
        size: Bytes of the file.
    """
    return min(size, 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES))


def read_header(start: bytes, size: int) -> Header:
    """Return the entries of a safetensors file by tensor.

    Args:
        start: The start of the file, with the whole header.
        size: Bytes of the file.

    Raises:
        ValueError: The header is damaged, or its tensors overlap or do not fill the file.
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
            if kind not in TYPES:
                raise ValueError(f"{name[:100]} has type {kind[:20]}, not known here")
            dtype, width = TYPES[kind]
            shape = tensor["shape"]
            begin, end = tensor["data_offsets"]
            are_counts = all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape))
            if not are_counts or begin != done:
                raise ValueError(f"{name[:100]} does not begin where the tensor before it ends")
            if end - begin != math.prod(shape) * width:
                raise ValueError(f"{name[:100]} has another size than its shape")
            entries[name] = TensorEntry(dtype, shape, 8 + length + begin)
            done = end
        if done != size - 8 - length:
            raise ValueError("its tensors do not fill the file")
    except Exception as error:  # untrusted: not a header
        raise ValueError(str(error)) from error
    return entries


def make_index(headers: Mapping[str, Header]) -> Index:
    """Find the files and positions of each tensor.

    Args:
        headers: Headers of the files of one kind, by file name.

    Raises:
        ValueError: Pieces do not make up whole tensors, or a tensor is in two files.
    """
    pieces: dict[str, list[TensorPiece]] = defaultdict(list)
    seen: set[str] = set()
    for file, header in headers.items():
        for name, entry in header.items():
            if name in seen:
                raise ValueError(f"{name[:100]} is in two files")
            seen.add(name)
            match = PIECE.fullmatch(name)
            if match is None:
                pieces[name].append(TensorPiece(0, entry.rows, entry, file))
            else:
                pieces[match[1]].append(TensorPiece(int(match[2]), int(match[3]), entry, file))
    index = {}
    for name, of_tensor in pieces.items():
        if name not in seen or len(of_tensor) > 1:  # in pieces
            of_tensor.sort(key=lambda piece: piece.first)
            _check_pieces(name, of_tensor)
        like = of_tensor[0]
        shape = like.entry.shape
        if shape:
            shape = [like.total, *shape[1:]]
        locations = [[piece.entry.rows, piece.file, piece.entry.offset] for piece in of_tensor]
        index[name] = [like.entry.dtype, shape, locations]
    return index


def _check_pieces(name: str, pieces: Sequence[TensorPiece]) -> None:
    """Check that pieces in the order of their rows make up a tensor.

    Raises:
        ValueError: They overlap, are incomplete or do not fit each other.
    """
    like = pieces[0]
    done = 0  # number of rows that have been checked
    for piece in pieces:
        shape = piece.entry.shape
        fits = (
            piece.first == done
            and piece.total == like.total
            and piece.entry.dtype == like.entry.dtype
            and shape  # not a scalar
            and shape[0] >= 1
            and shape[1:] == like.entry.shape[1:]
        )
        if not fits:
            raise ValueError(f"the pieces of {name[:100]} do not fit each other at row {done}")
        done += shape[0]
    if done != like.total:
        raise ValueError(f"the pieces of {name[:100]} have {done} of {like.total} rows")


def read_rows(chunks: Chunks, entry: list[Any], first: int = 0, end: int | None = None) -> Tensor:
    """Read rows of a tensor, by default all. It takes no more memory than the rows.

    Args:
        chunks: Reads bytes of a file.
        entry: The tensor's entry in an index.

    Raises:
        OSError: A file has fewer bytes.
        RuntimeError: The tensor is too large.
    """
    import torch

    type_name, shape, locations = entry
    dtype = getattr(torch, type_name)
    if end is None:
        end = shape[0] if shape else 1
    width = math.prod(shape[1:]) * dtype.itemsize  # bytes of a row
    tensor = torch.empty([end - first, *shape[1:]] if shape else [], dtype=dtype)
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    done = 0  # number of bytes read
    row = 0  # first row of a piece, in the tensor
    for rows, file, offset in locations:
        begin = max(first, row)
        stop = min(end, row + rows)
        if begin < stop and width:
            size = (stop - begin) * width
            start = offset + (begin - row) * width
            for chunk in chunks(file, size, start):
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        row += rows
    if done != len(content):
        raise OSError(f"{locations[0][1]} has changed while it was read")
    return tensor


def check_memory(what: str, size: int) -> None:
    """Check that files of this size, in bytes, can be read and decoded.

    Raises:
        MemoryError: They are too large.
    """
    if 2 * size > installed_memory():  # decoding needs them as bytes and as tensors
        raise MemoryError(f"{what} is larger than the memory")


def decode(contents: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Decode safetensors files in memory. Return their tensors by name.

    Args:
        contents: The files by name.

    Raises:
        ValueError, RuntimeError: A file is not a safetensors file, or a piece of a tensor is
            missing.
    """
    headers = {name: read_header(content, len(content)) for name, content in contents.items()}

    def chunks(file: str, size: int, start: int) -> Iterable[memoryview]:
        return [memoryview(contents[file])[start : start + size]]

    return {name: read_rows(chunks, entry) for name, entry in make_index(headers).items()}
