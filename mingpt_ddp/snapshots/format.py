"""What a snapshot consists of, and how its manifest says so.

A snapshot is a directory `step_00001000` with model.safetensors, optimizer.safetensors, state.json and, written last,
manifest.json with the size and SHA-256 of the others. Where several ranks write, the tensors are divided over files
model-00001-of-00002.safetensors and so on. Without a manifest that fits, it does not exist. Nothing in it can run code:
tensors are safetensors, the rest is JSON. What a stranger made can be read as safely: names are ours or refused, sizes
are known before anything is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from torch import Tensor

from mingpt_ddp.errors import SnapshotError

Files: TypeAlias = dict[str, dict[str, Any]]  # name -> {"bytes": size, "sha256": digest}

FORMAT = 1  # a newer one has to write its manifest in another form: a flipped bit in this digit is damage
MANIFEST, STATE = "manifest.json", "state.json"
KINDS = ("model", "optimizer")
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SMALL = 1 << 24  # bytes: no state of ours is larger, not even with every character there is
LARGEST_MANIFEST = 1 << 22  # bytes: that of 10,000 parts is smaller
LARGEST_CONFIG = 1 << 16  # characters of a run's configuration, in a snapshot's state or in its config.yaml
DEEPEST = 20  # JSON within JSON
SMALLEST_PART = 1 << 24  # bytes: dividing less than this costs more in files than it gains


class CorruptSnapshotError(Exception):
    """This snapshot is not what was written."""


class IncompleteSnapshotError(CorruptSnapshotError):
    """It was never committed."""


@dataclass(frozen=True)
class Snapshot:
    """The content of one snapshot, all of it on the CPU."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # `<parameter>:<name>`, see tensors.py
    state: dict[str, Any]  # plain values: configuration, position, scaler, losses, vocabulary


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    match = re.fullmatch(r"step_([0-9]{8,18})", name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def part_name(kind: str, part: int, parts: int) -> str:
    """The file of one part of the tensors; parts count from 0, in the name from 1."""
    return f"{kind}.safetensors" if parts == 1 else f"{kind}-{part + 1:05d}-of-{parts:05d}.safetensors"


def shard_tensors(tensors: Mapping[str, Mapping[str, Tensor]], writers: int) -> list[dict[str, dict[str, Tensor]]]:
    """The files of each writer, as equal in bytes as whole tensors can be; the same on every rank.

    Args:
        tensors: by kind and name.
    """
    everything = [(tensor.nbytes, kind, name) for kind, named in tensors.items() for name, tensor in named.items()]
    parts = max(1, min(writers, sum(size for size, _, _ in everything) // SMALLEST_PART))
    loads = [0] * parts
    files: list[dict[str, dict[str, Tensor]]] = [{part_name(k, i, parts): {} for k in tensors} for i in range(parts)]
    for size, kind, name in sorted(everything, reverse=True):  # the largest first, each to whom has least
        part = loads.index(min(loads))
        loads[part] += size
        files[part][part_name(kind, part, parts)][name] = tensors[kind][name]
    return files


def manifest_of(step: int, files: Files, version: int = FORMAT) -> bytes:
    return json.dumps({"format": version, "step": step, "files": files}, indent=1).encode()


def files_of(manifest: bytes, step: int) -> Files:
    """What the manifest of a step lists.

    Raises:
        CorruptSnapshotError: it is not byte for byte as we write it.
        SnapshotError: it is of a newer format.
    """
    try:
        values = strict_json_loads(manifest)
        version, files = values["format"], values.get("files")
        newer = isinstance(version, int) and version > FORMAT
        if newer and manifest != manifest_of(values.get("step"), files, version):
            raise SnapshotError(f"the snapshot of step {step} has format {version}, of a newer version; upgrade")
        sound = values["step"] == step and manifest_of(step, files) == manifest
        sound &= all(isinstance(f["bytes"], int) and isinstance(f["sha256"], str) for f in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSnapshotError(f"{MANIFEST} is damaged") from error
    if not sound or not _is_complete(files) or files[STATE]["bytes"] > SMALL:
        raise CorruptSnapshotError(f"{MANIFEST} does not describe step {step} in format {FORMAT}")
    return files


def _is_complete(files: Files) -> bool:
    """State, model and optimizer are there with all their parts, and nothing else is."""
    parts = max(1, (len(files) - 1) // len(KINDS))
    return files.keys() == {STATE, *(part_name(kind, i, parts) for kind in KINDS for i in range(parts))}


def strict_json_loads(content: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, has numbers that JSON does not know, or is nested deeper than anything of ours.
        RecursionError: likewise.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    value = json.loads(content, parse_constant=refuse)
    level = [value]
    for _ in range(DEEPEST):
        groups = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [inner for group in groups for inner in group]
    if level:
        raise ValueError("it is nested deeply")
    return value
