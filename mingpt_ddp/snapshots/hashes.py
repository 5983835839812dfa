"""Compute the SHA-256 of tensors: of a set of weights, or of each kind of a snapshot."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mingpt_ddp.snapshots.format import KINDS, TENSOR_KINDS, Snapshot
from mingpt_ddp.snapshots.staging_buffer import DTYPES

Hashes = dict[str, str]  # by kind


def content_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor. They depend neither on its device nor on its strides."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def sha256_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes, types and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(content_of(tensor))
    return digest.hexdigest()


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor or piece: its name, type, shape and SHA-256."""
    lines = []
    for name, tensor in tensors.items():
        digest = hashlib.sha256(content_of(tensor))
        shape = list(tensor.shape)
        lines.append(f"{name} {DTYPES[tensor.dtype]} {shape} {digest.hexdigest()}")
    return lines


def hash_lines(described: Iterable[Mapping[str, list[str]]]) -> Hashes:
    """Return the hash of each kind: the SHA-256 of its lines in alphabetical order.

    Args:
        described: Lines of `describe_tensors` by kind, from each rank.
    """
    lines = defaultdict[str, list[str]](list)
    for lines_of_rank in described:
        for kind, lines_of_kind in lines_of_rank.items():
            lines[kind] += lines_of_kind
    hashes = {}
    for kind in sorted(lines):
        text = "\n".join(sorted(lines[kind]))
        hashes[kind] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def hash_snapshot(snapshot: Snapshot) -> Hashes:
    """Return the hashes of a snapshot that was read as a whole."""
    described = {}
    for kind in TENSOR_KINDS:
        tensors = getattr(snapshot, kind)
        if tensors or kind in KINDS:
            described[kind] = describe_tensors(tensors)
    return hash_lines([described])
