"""Compute SHA-256 hashes: one for a set of weights, or one for each kind of tensors in a snapshot.

The kinds are model, optimizer, ema and hooks (format.py).
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mingpt_ddp.snapshots.format import REQUIRED_KINDS, TENSOR_KINDS, Snapshot
from mingpt_ddp.snapshots.staging_buffer import DTYPES

HashByKind = dict[str, str]  # kind of tensors -> SHA-256


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as bytes. They do not depend on its device or its strides."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Compute one SHA-256 of the names, shapes, types and values of tensors, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor, or piece of a tensor: its name, type, shape and SHA-256."""
    lines = []
    for name, tensor in tensors.items():
        digest = hashlib.sha256(tensor_bytes(tensor))
        shape = list(tensor.shape)
        lines.append(f"{name} {DTYPES[tensor.dtype]} {shape} {digest.hexdigest()}")
    return lines


def hash_lines(lines_by_rank: Iterable[Mapping[str, list[str]]]) -> HashByKind:
    """Compute one hash for each kind of tensors, from the lines that describe the tensors.

    The hash is the SHA-256 of the lines of all ranks, in alphabetical order.

    Args:
        lines_by_rank: For each rank, the lines that `describe_tensors` returned, by kind.
    """
    lines = defaultdict[str, list[str]](list)
    for lines_of_rank in lines_by_rank:
        for kind, lines_of_kind in lines_of_rank.items():
            lines[kind] += lines_of_kind
    hashes = {}
    for kind in sorted(lines):
        text = "\n".join(sorted(lines[kind]))
        hashes[kind] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def hash_snapshot(snapshot: Snapshot) -> HashByKind:
    """Hash the tensors of each kind in a snapshot. All of its tensors must have been read."""
    described = {}
    for kind in TENSOR_KINDS:
        tensors = getattr(snapshot, kind)
        if tensors or kind in REQUIRED_KINDS:
            described[kind] = describe_tensors(tensors)
    return hash_lines([described])
