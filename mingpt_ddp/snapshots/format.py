"""The snapshot format: its files, their names, and the manifest that commits them.

A snapshot is a directory, for example `step_00001000`, with these files:

    model.safetensors      parameters and buffers        (state_dict.py)
    optimizer.safetensors  the optimizer's state         (state_dict.py)
    ema.safetensors        the average of the weights and the buffers, if trainer.ema is set
    hooks.safetensors      the state of the user's hooks, if a hook has state; never sharded
    state.json             the train state, configuration, vocabulary   (training/train_state.py)
    manifest.json          size and SHA-256 of the other files, and its own SHA-256; written last

If several ranks write, each rank writes some of the files. A large snapshot is split over several
files, such as model-00001-of-00002.safetensors. Such a shard holds whole tensors, or pieces of
tensors. A piece is some consecutive rows of a tensor (tensor_index.py). Without a valid manifest,
the snapshot does not exist.

Nothing in a snapshot can run code: tensors are stored as safetensors, everything else as JSON.
Untrusted snapshots are safe to read, because names are validated and the size of each file is known
before it is read.

Files, fields and tensors never change their names. Later versions may add files, fields
and tensors, which this version ignores.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from mingpt_ddp.errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

# The files that a manifest lists: name -> {"bytes": size, "sha256": digest}.
Files: TypeAlias = dict[str, dict[str, Any]]

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
# Every file belongs to a kind, which is the first word of its name. Tensors have the kind of their
# file.
REQUIRED_KINDS = ("model", "optimizer")
WEIGHT_KINDS = (*REQUIRED_KINDS, "ema")  # ema is present only if trainer.ema is set
HOOKS = "hooks"
TENSOR_KINDS = (*WEIGHT_KINDS, HOOKS)  # hooks is present only if a hook has state
FILE_KINDS = (*TENSOR_KINDS, "state", "manifest")
MODEL = "model.safetensors"
MAX_STATE_BYTES = 1 << 24  # enough for a vocabulary of all Unicode characters
MAX_MANIFEST_BYTES = 1 << 22  # enough for 10,000 shards
MAX_JSON_DEPTH = 20
MAX_HEADER_BYTES = 1 << 24  # header of a safetensors file; enough for 100,000 tensors
# Writing smaller shards in parallel would save less time than the additional requests take.
MIN_SHARD_BYTES = 1 << 24


class CorruptSnapshotError(Exception):
    """A file of the snapshot is missing, or its content is not the content that was written."""


class IncompleteSnapshotError(CorruptSnapshotError):
    """The snapshot has no manifest: it was never committed."""


@dataclass(frozen=True)
class Snapshot:
    """The content of one snapshot, on the CPU."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # named `<parameter>:<key>`, see state_dict.py
    # The values in state.json: configuration, train state, gradient scaler, losses, vocabulary.
    state: dict[str, Any]
    ema: dict[str, Tensor] = field(default_factory=dict)  # named as in `model`
    hooks: dict[str, Tensor] = field(default_factory=dict)  # named by `pack_state`
    # Where to find the tensors if they have not been read: the URL of the snapshots, and the
    # position of each tensor in their files (see tensor_index.py). None if they have been read.
    index: Any = None


def directory_name(step: int) -> str:
    """Return the name of the directory that holds the snapshot of a step."""
    return f"step_{step:08d}"


def path_of(step: int, name: str) -> str:
    """Return the path of a file in the snapshot of a step, relative to the URL of all snapshots."""
    return f"{directory_name(step)}/{name}"


def step_of(name: str) -> int | None:
    """Parse the step from the name of a snapshot directory. Return None for any other name."""
    match = re.fullmatch(r"step_([0-9]{8,18})", name)
    return int(match[1]) if match and directory_name(int(match[1])) == name else None


def shard_name(kind: str, shard: int, shards: int) -> str:
    """Return the name of the file that holds one shard.

    Args:
        shard: Number of the shard, counted from 0. In the file name, shards are counted from 1.
        shards: Number of all shards of this kind.
    """
    if shards == 1:
        return f"{kind}.safetensors"
    return f"{kind}-{shard + 1:05d}-of-{shards:05d}.safetensors"


def kind_of(name: str) -> str:
    """Return the kind of a file, such as model or state. Later versions may add kinds."""
    return re.split("[.-]", name)[0]


def encode_json(values: dict[str, Any]) -> bytes:
    """Encode the content of state.json or of the manifest."""
    return json.dumps(values, indent=1, allow_nan=False).encode()


def encode_manifest(step: int, files: Files, **added: Any) -> bytes:
    """Encode a manifest.

    Args:
        added: Fields to add, as a later version may do. This version itself never adds any.
    """
    return _with_digest({"format": FORMAT, "step": step, "files": files, **added})


def _with_digest(values: dict[str, Any]) -> bytes:
    """Encode values, with their SHA-256 as the last field, which reveals any flipped bit."""
    digest = hashlib.sha256(encode_json(values)).hexdigest()
    return encode_json({**values, "sha256": digest})


def decode_manifest(content: bytes, step: int) -> Files:
    """Decode the manifest of a step. Return the files that it lists.

    Raises:
        CorruptSnapshotError: The manifest differs from the bytes that `encode_manifest` writes.
        SnapshotError: This version cannot read the format in which the manifest was written.
    """
    try:
        values = load_json(content)
        if "sha256" not in values and content == encode_json({**values, "format": 1}):
            raise SnapshotError(
                f"the snapshot of step {step} was written by an earlier version, in format 1; "
                "start again with run.resume=never, or finish the run with that version"
            )
        del values["sha256"]
        valid = content == _with_digest(values)
        if valid and values["format"] > FORMAT:
            raise SnapshotError(
                f"the snapshot of step {step} was written by a newer version, in format "
                f"{values['format']}; upgrade mingpt_ddp"
            )
        valid &= values["format"] == FORMAT and values["step"] == step
        files = values["files"]
        valid &= all(map(_is_entry, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptSnapshotError(f"{MANIFEST} is damaged") from error
    if not (valid and _has_our_files(files)):
        raise CorruptSnapshotError(f"{MANIFEST} does not describe step {step} in format {FORMAT}")
    return files


def _is_entry(file: Any) -> bool:
    return isinstance(file["bytes"], int) and isinstance(file["sha256"], str)


def _has_our_files(files: Files) -> bool:
    """Return True if a manifest lists all required files, and only valid file names."""
    present = [kind_of(name) for name in files]
    shards = max(1, present.count(REQUIRED_KINDS[0]))
    kinds = WEIGHT_KINDS if "ema" in present else REQUIRED_KINDS
    ours = {STATE}
    if HOOKS in present:
        ours.add(shard_name(HOOKS, 0, 1))
    for kind in kinds:
        ours.update(shard_name(kind, shard, shards) for shard in range(shards))
    if not ours <= files.keys() or files[STATE]["bytes"] > MAX_STATE_BYTES:
        return False
    # Later versions may add files. Their names may not contain path separators or collide with
    # the names of our files.
    for name in files.keys() - ours:
        if kind_of(name) in FILE_KINDS or not re.fullmatch(r"[a-z0-9_]+\.[a-z]+", name):
            return False
    return True


def load_json(content: bytes) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: The content is not JSON, has NaN or infinite numbers, or is nested too deeply.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        value = json.loads(content, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                below.extend(outer.values())
            elif isinstance(outer, list):
                below.extend(outer)
        level = below
    if level:
        raise ValueError("it is nested too deeply")
    return value
