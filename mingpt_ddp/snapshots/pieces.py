"""Tensors in pieces of rows, which several ranks write, and reading some rows of a snapshot.

A piece is a safetensors tensor named `<tensor>@<first row>-of-<rows>`. Rows are consecutive bytes,
so that any rank of any number of ranks reads its rows from whole tensors and from pieces of other
sizes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.snapshots.staging_buffer import TensorEntry
from mingpt_ddp.storage.storage import Storage

T = TypeVar("T")
PIECE = re.compile(r"(.+)@([0-9]{1,15})-of-([0-9]{1,15})", flags=re.DOTALL)


@dataclass(frozen=True)
class Rows(Generic[T]):
    """Some or all rows of a tensor."""

    dtype: torch.dtype
    shape: list[int]
    value: T  # the rows, or where they are


@dataclass(frozen=True)
class Piece(Generic[T]):
    """Rows of a tensor that is not whole in one file, by their name there."""

    first: int  # row of the tensor
    total: int  # rows of the tensor
    rows: Rows[T]


def own_parts(strategy: Strategy, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this rank writes of some tensors, whole or pieces, by name."""
    parts = {}
    for name, tensor in named.items():
        part = strategy.part_to_write(name.partition(":")[0], tensor)
        if part is None:
            continue
        first, rows = part
        if rows.shape != tensor.shape:
            name = f"{name}@{first}-of-{len(tensor)}"
        parts[name] = rows
    return parts


def group_pieces(named: Mapping[str, Rows[T]]) -> dict[str, list[Rows[T]]]:
    """Return for each tensor its parts in row order, or it alone if it is whole.

    Raises:
        ValueError: the pieces of a tensor overlap, are incomplete or do not fit each other.
    """
    grouped: dict[str, list[Rows[T]]] = {}
    pieces: dict[str, list[Piece[T]]] = defaultdict(list)
    for name, rows in named.items():
        match = PIECE.fullmatch(name)
        if match is None:
            grouped[name] = [rows]
        else:
            pieces[match[1]].append(Piece(int(match[2]), int(match[3]), rows))
    for name, of_tensor in pieces.items():
        of_tensor.sort(key=lambda piece: piece.first)
        found = _count_rows(name, of_tensor)
        total = of_tensor[0].total
        if found != total or name in grouped:
            raise ValueError(
                f"the pieces of {name[:100]} have {found} of {total} rows, or it is there twice"
            )
        grouped[name] = [piece.rows for piece in of_tensor]
    return grouped


def _count_rows(name: str, pieces: list[Piece[Any]]) -> int:
    """Return how many rows the pieces of a tensor have together.

    Raises:
        ValueError: they overlap, have gaps, or are not of one tensor.
    """
    like = pieces[0]
    count = 0
    for piece in pieces:
        rows = piece.rows
        fits = (
            piece.first == count
            and piece.total == like.total
            and rows.dtype == like.rows.dtype
            and rows.shape  # not a scalar
            and rows.shape[0] >= 1
            and rows.shape[1:] == like.rows.shape[1:]
        )
        if not fits:
            raise ValueError(f"the pieces of {name[:100]} do not fit each other at row {count}")
        count += rows.shape[0]
    return count


def merge(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors; clear `named`, so that a piece is freed once it has been copied.

    Raises:
        ValueError: pieces do not make up whole tensors.
    """
    parts = {name: Rows(t.dtype, list(t.shape), t) for name, t in named.items()}
    grouped = group_pieces(parts)
    parts.clear()
    named.clear()
    joined = {}
    for name in list(grouped):
        tensors = [rows.value for rows in grouped.pop(name)]
        joined[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return joined


def make_index(headers: Mapping[str, Mapping[str, TensorEntry]]) -> dict[str, Any]:
    """Return where each tensor is: name -> [type, shape, [[rows, file, offset], ...]].

    These are JSON values, in which a scalar has one row.

    Args:
        headers: of the files of one kind, by file name.

    Raises:
        ValueError: pieces do not make up whole tensors, or a tensor is in two files.
    """
    parts: dict[str, Rows[tuple[str, int]]] = {}
    for file, header in headers.items():
        for name, entry in header.items():
            if name in parts:
                raise ValueError("a tensor is in two files")
            parts[name] = Rows(entry.dtype, entry.shape, (file, entry.offset))
    index = {}
    for name, in_order in group_pieces(parts).items():
        dtype = str(in_order[0].dtype).removeprefix("torch.")
        shape = in_order[0].shape
        locations = []
        total = 0
        for rows in in_order:
            file, offset = rows.value
            count = rows.shape[0] if rows.shape else 1
            locations.append([count, file, offset])
            total += count
        if shape:
            shape = [total, *shape[1:]]
        index[name] = [dtype, shape, locations]
    return index


def read_rows(storage: Storage, directory: str, entry: list[Any], first: int, end: int) -> Tensor:
    """Return rows of a tensor, in memory of that size.

    Args:
        entry: of the index.

    Raises:
        OSError: the storage has fewer bytes.
    """
    type_name, shape, locations = entry
    dtype = getattr(torch, type_name)
    width = math.prod(shape[1:]) * dtype.itemsize  # bytes of a row
    tensor = torch.empty([end - first, *shape[1:]] if shape else [], dtype=dtype)
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    done = 0  # bytes read
    row = 0  # of the tensor, the first of a piece
    for rows, file, offset in locations:
        begin = max(first, row)
        stop = min(end, row + rows)
        if begin < stop and width:
            size = (stop - begin) * width
            start = offset + (begin - row) * width
            for chunk in storage.chunks(f"{directory}/{file}", size, start):
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        row += rows
    if done != len(content):
        raise OSError(f"{directory} has changed while it was read")
    return tensor
