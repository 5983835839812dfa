"""The state of the user's hooks, as named tensors of a snapshot.

The state of a hook is a flat dictionary of tensors, numbers and text. A snapshot stores each tensor
under the name `["<hook>", "<key>"]`, a JSON list. It stores the numbers and texts of a hook as one
JSON object, encoded as a tensor of bytes under the name `["<hook>"]`. If the value of a key is a
tensor, the object has null under this key.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.snapshots.staging_buffer import DTYPES

PLAIN_TYPES = (bool, int, float, str, type(None))
MIN_JSON_BYTES = 64


def pack_state(name: str, state: Any) -> dict[str, Tensor]:
    """Pack the state of a hook into named tensors. The tensors in the state are not copied.

    Raises:
        CodeError: The state is not a flat dictionary of tensors, numbers and text.
    """
    if not isinstance(state, dict):
        raise CodeError(f"state_dict() must return a dictionary, not {type(state).__name__}")
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if type(key) is not str:
            raise CodeError(
                f"state_dict() cannot be saved: a key has type {type(key).__name__}; use only text "
                "as keys"
            )
        plain[key] = None
        if isinstance(value, Tensor) and value.dtype in DTYPES and _is_dense(value):
            tensors[json.dumps([name, key])] = value
        elif type(value) in PLAIN_TYPES:
            plain[key] = value
        else:
            raise CodeError(
                f"state_dict()[{key!r:.100}] cannot be saved: it holds {_type_of(value)}; use a "
                "flat dictionary of numbers, text and dense tensors of a standard type"
            )
    try:
        text = json.dumps(plain).encode()
    except ValueError as error:  # a number of more than 4300 digits
        raise CodeError(f"state_dict() cannot be saved as JSON: {error}") from error
    # Round the size up. If a number or text gets a little longer, the staging buffer still fits.
    size = max(MIN_JSON_BYTES, 1 << (len(text) - 1).bit_length())
    tensors[json.dumps([name])] = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
    return tensors


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _type_of(value: Any) -> str:
    """Describe the type of a value for an error message."""
    if isinstance(value, Tensor) and not _is_dense(value):
        return "a sparse, nested or meta tensor"
    return str(getattr(value, "dtype", type(value).__name__))


def unpack_states(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Unpack the states of all hooks, by the name of the hook. Copy their tensors to a device.

    Args:
        tensors: The untrusted tensors of kind `hooks` in a snapshot.

    Raises:
        SnapshotError: The tensors do not have the form in which `pack_state` packs a state.
    """
    states: dict[str, Any] = {}
    try:
        paths = {name: json.loads(name) for name in tensors}
        for name, path in paths.items():
            if len(path) == 1:
                states[path[0]] = dict(_plain_values(tensors[name]))
        for name, path in paths.items():
            if len(path) != 1:
                hook, key = path
                states[hook][key] = tensors[name].to(device, copy=True)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(
            f"the state of the hooks in the snapshot is invalid: {error!r:.200}; use another "
            "snapshot"
        ) from error
    return states


def _plain_values(tensor: Tensor) -> Any:
    """Decode the JSON object with the numbers and texts of a hook's state."""
    return json.loads(tensor.numpy().tobytes())


def describe_states(tensors: Mapping[str, Tensor], lines: Sequence[str]) -> dict[str, str]:
    """Hash each value in the states of the hooks.

    Return the hashes by the name of the value, which is the JSON list `["<hook>", "<key>"]`.

    Args:
        tensors: The tensors that `pack_state` returned, on the CPU.
        lines: The line of each tensor, as `describe_tensors` returned it.
    """
    described: dict[str, str] = {}
    for (name, tensor), line in zip(tensors.items(), lines, strict=True):
        path = json.loads(name)
        if len(path) == 1:
            for key, value in _plain_values(tensor).items():
                digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
                described.setdefault(json.dumps([*path, key]), digest)
        else:
            described[name] = line
    return described


def refuse_differing_states(step: int, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse a state of a hook that differs between the ranks.

    Args:
        by_rank: For each rank, the hashes that `describe_states` returned.

    Raises:
        CodeError: The state of a hook differs between the ranks. The message names the hook, the
            key and the ranks that differ from rank zero.
    """
    for path in sorted({path for described in by_rank for path in described}):
        expected = by_rank[0].get(path)
        differing_ranks = [rank for rank, each in enumerate(by_rank) if each.get(path) != expected]
        if differing_ranks:
            name, key = json.loads(path)
            event, _, hook = name.partition(" ")
            plural = "s" if len(differing_ranks) > 1 else ""
            ranks = f"rank{plural} {', '.join(map(str, differing_ranks))}"
            raise CodeError(
                f"{hook} of @acts({event!r}): state_dict()[{key!r:.100}] on {ranks} differs from "
                f"rank 0 at step {step}, so the step is not saved; keep the same state on all ranks"
            )
