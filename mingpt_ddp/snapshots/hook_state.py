"""The state of hooks of the user that act, JSON values and tensors, as named tensors of a snapshot.

The name of a tensor is its path, a JSON list that begins with the name of its hook; the list of
that name alone has the rest of the state, as JSON text.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mingpt_ddp.errors import CodeError, SnapshotError
from mingpt_ddp.snapshots.staging_buffer import DTYPES

PLAIN = (bool, int, float, str, type(None))
LEAST_BYTES = 64


def pack_state(name: str, state: Any) -> dict[str, Tensor]:
    """Return the state of a hook as named tensors; those in it are not copied.

    Raises:
        CodeError: it holds what is neither JSON nor a tensor.
    """
    if not isinstance(state, dict):
        raise CodeError(f"state_dict() must return a dictionary, not {type(state).__name__}")
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: list[str | int]) -> Any:
        """Return a value without tensors, for which null stands."""
        if isinstance(value, Tensor) and value.dtype in DTYPES and _is_dense(value):
            tensors[json.dumps(path)] = value
            return None
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str:
                    raise _error(path, f"a key is {type(key).__name__}")
            return {key: plain(each, [*path, key]) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each, [*path, index]) for index, each in enumerate(value)]
        if type(value) in PLAIN:
            return value
        kind = getattr(value, "dtype", type(value).__name__)
        if isinstance(value, Tensor) and not _is_dense(value):
            kind = "a sparse, nested or meta tensor"
        raise _error(path, f"it holds {kind}")

    try:
        text = json.dumps(plain(state, [name])).encode()
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise CodeError(f"state_dict() cannot be saved as JSON: {error}") from error
    # a longer number or list should need no new staging buffers
    size = max(LEAST_BYTES, 1 << (len(text) - 1).bit_length())
    tensors[json.dumps([name])] = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
    return tensors


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _error(path: list[str | int], reason: str) -> CodeError:
    """Return an error that names the key of the first level, if the value is below one."""
    where = "".join(f"[{key!r:.100}]" for key in path[1:2])
    return CodeError(
        f"state_dict(){where} cannot be saved: {reason}; use JSON values, with text as keys, and "
        "dense tensors of a standard type"
    )


def unpack_states(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Return the state of each hook by its name, with copies of the tensors on a device.

    Args:
        tensors: of a snapshot, untrusted.

    Raises:
        SnapshotError: they are not what `pack_state` returned.
    """
    states: dict[str, Any] = {}
    try:
        paths = {name: json.loads(name) for name in tensors}
        for name, path in paths.items():
            if len(path) == 1:
                states[path[0]] = json.loads(tensors[name].numpy().tobytes())
        for name, (*outer, last) in paths.items():
            container: Any = states
            for key in outer:
                container = container[key]
            if outer:
                container[last] = tensors[name].to(device, copy=True)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(
            f"the snapshot has an invalid state of hooks: {error!r:.200}"
        ) from error
    return states
