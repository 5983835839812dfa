"""Tensors in pieces of rows, which several ranks write, and reading only some rows of a snapshot's
tensors.

A piece is a safetensors tensor named `<tensor>@<first row>-of-<rows>`. Rows are consecutive bytes,
so that any rank of any number of ranks reads its rows from whole tensors and from pieces of other
sizes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.storage.storage import Storage

T = TypeVar("T")
PIECE = re.compile(r"(.+)@([0-9]{1,15})-of-([0-9]{1,15})", flags=re.DOTALL)


def own_parts(strategy: Strategy, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this rank writes of some tensors, whole or pieces, by name."""
    parts = {}
    for name, tensor in named.items():
        part = strategy.part_to_write(name.partition(":")[0], tensor)
        if part is not None:
            first, rows = part
            whole = rows.shape == tensor.shape
            parts[name if whole else f"{name}@{first}-of-{len(tensor)}"] = rows
    return parts


def group_pieces(
    named: Mapping[str, T], describe: Callable[[T], tuple[torch.dtype, list[int]]]
) -> dict[str, tuple[list[int], list[T]]]:
    """Return for each tensor its shape and its pieces in row order.

    Args:
        describe: returns type and shape of a piece.

    Raises:
        ValueError: the pieces of a tensor overlap, are incomplete or do not fit each other.
    """
    pieces: dict[str, list[tuple[int, int, T]]] = defaultdict(list)
    grouped = {}
    for name, value in named.items():
        if match := PIECE.fullmatch(name):
            pieces[match[1]].append((int(match[2]), int(match[3]), value))
        else:
            grouped[name] = (describe(value)[1], [value])
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        dtype, shape = describe(found[0][2])
        row = 0
        total = found[0][1]
        for first, rows, value in found:
            other, own = describe(value)
            if (
                not own
                or (first, rows, other, own[1:]) != (row, total, dtype, shape[1:])
                or own[0] < 1
            ):
                raise ValueError(f"the pieces of {name[:100]} do not fit each other at row {row}")
            row += own[0]
        if row != total or name in grouped:
            raise ValueError(
                f"the pieces of {name[:100]} have {row} of {total} rows, or it is there twice"
            )
        grouped[name] = ([total, *shape[1:]], [value for _, _, value in found])
    return grouped


def merge(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors; clear `named`, so that a piece is freed once it has been copied.

    Raises:
        ValueError: pieces do not make up whole tensors.
    """
    grouped = group_pieces(named, lambda tensor: (tensor.dtype, list(tensor.shape)))
    named.clear()
    joined = {}
    for name in list(grouped):
        parts = grouped.pop(name)[1]
        joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined


def make_index(
    headers: Mapping[str, Mapping[str, tuple[torch.dtype, list[int], int]]],
) -> dict[str, Any]:
    """Return where each tensor is, as JSON values: name -> [type, shape, [[rows, file, offset],
    ...]].

    Args:
        headers: of the files of one kind, by file name.

    Raises:
        ValueError: pieces do not make up whole tensors, or a tensor is in two files.
    """
    named = {
        tensor: (file, *entry)
        for file, header in headers.items()
        for tensor, entry in header.items()
    }
    if len(named) != sum(map(len, headers.values())):
        raise ValueError("a tensor is in two files")
    index = {}
    for name, (shape, parts) in group_pieces(named, lambda part: (part[1], part[2])).items():
        dtype = str(parts[0][1]).removeprefix("torch.")
        index[name] = [
            dtype,
            shape,
            [[own[0] if own else 1, file, offset] for file, _, own, offset in parts],
        ]
    return index


def read_rows(storage: Storage, directory: str, entry: list[Any], first: int, end: int) -> Tensor:
    """Return rows of a tensor, in memory of that size.

    Args:
        entry: of the index.

    Raises:
        OSError: the storage has fewer bytes.
    """
    dtype = getattr(torch, entry[0])
    shape = entry[1]
    width = math.prod(shape[1:]) * dtype.itemsize  # bytes of a row
    tensor = torch.empty([end - first, *shape[1:]] if shape else [], dtype=dtype)
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    # bytes read; the first row of a piece
    done = 0
    row = 0
    for rows, file, offset in entry[2]:
        begin = max(first, row)
        stop = min(end, row + rows)
        if begin < stop and width:
            for chunk in storage.chunks(
                f"{directory}/{file}", (stop - begin) * width, offset + (begin - row) * width
            ):
                content[done : done + len(chunk)] = chunk
                done += len(chunk)
        row += rows
    if done != len(content):
        raise OSError(f"{directory} has changed while it was read")
    return tensor
