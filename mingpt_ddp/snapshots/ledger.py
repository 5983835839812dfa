"""The ledger of a run: the hashes of every snapshot, which stay when retention has deleted it.

`snapshots.jsonl` in the run directory has a line for each commit:

    {"step": 100, "model": "9f86d0...", "optimizer": "60303a...", "ema": "fd61a0..."}

A hash is the SHA-256 of the names, types, shapes and SHA-256s of all tensors of a kind. It depends
on what a snapshot holds, not on how many ranks wrote it.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mingpt_ddp.metrics.jsonl import append_line
from mingpt_ddp.snapshots.format import TENSOR_KINDS
from mingpt_ddp.snapshots.staging_buffer import DTYPES

log = logging.getLogger(__name__)

LEDGER = "snapshots.jsonl"
MAX_BYTES = 1 << 28  # of a ledger that is read: a million snapshots
DIGEST = re.compile("[0-9a-f]{64}")
Hashes = dict[str, str]  # by kind


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each CPU tensor, or piece of one: its name, type, shape and SHA-256."""
    lines = []
    for name, tensor in tensors.items():
        digest = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        shape = list(tensor.shape)
        lines.append(f"{name} {DTYPES[tensor.dtype]} {shape} {digest.hexdigest()}")
    return lines


def hash_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of the lines of all tensors of a kind, in any order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of whole tensors, as the ledger has it."""
    return hash_lines(describe_tensors(tensors))


class Ledger:
    """The ledger in a run directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / LEDGER
        self._has_failed = False

    def append(self, step: int, hashes: Hashes) -> None:
        """Add the hashes of a snapshot; a warning, once, is all if they cannot be written."""
        try:
            append_line(self.path, json.dumps({"step": step, **hashes}).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write %s: %s", self.path, error.strerror or error)
            self._has_failed = True

    def read(self) -> dict[int, Hashes]:
        """Return the newest hashes of each step; lines that are no such record are skipped."""
        found = {}
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file.read(MAX_BYTES).splitlines():
                with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                    record = json.loads(line)
                    step = record.pop("step", None)
                    hashes = {kind: record[kind] for kind in TENSOR_KINDS if kind in record}
                    if type(step) is int and all(map(DIGEST.fullmatch, hashes.values())):
                        found[step] = hashes
        return found
