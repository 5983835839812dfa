"""Observe a rank on the fake GPU: its collectives, and how often the host waits for the GPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mingpt_ddp
from fake_gpu.device import is_pinned, listeners

aten = torch.ops.aten
PACKAGE = str(Path(mingpt_ddp.__file__).parent)
READS = (aten._local_scalar_dense.default, aten.is_nonzero.default)
COPIES = (aten._to_copy.default, aten.copy_.default)
COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
}


def place() -> str:
    """Return the package's innermost function on the stack, as `room/module.py function`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_name
        if path.startswith(PACKAGE) and not name.startswith("<"):  # <dictcomp>, <lambda>
            return f"{path.removeprefix(PACKAGE)[1:]} {name}"
        frame = frame.f_back
    return "backward"  # a thread of autograd has no function of the package on its stack


def value_like(tensor: Tensor) -> bool | int | float:
    """Return a value that a healthy run could read: True, no overflow, or a count of one."""
    if tensor.dtype == torch.bool:
        return True
    return 0.0 if tensor.is_floating_point() else 1


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def group_size(args: Any) -> int:
    """Return the number of ranks of a collective.

    Its arguments contain either a boxed process group or the name of one.
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return ProcessGroup.unbox(argument).size()
    names = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(names[-1]).size()


class Observer(TorchDispatchMode):
    """Count waits by kind and place, and collectives and their bytes by kind and number of ranks.

    The bytes of a collective are the size of the whole message: the shards of all ranks together,
    if each rank has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()
        self.collectives: dict[str, list[int]] = {}

    def forget(self) -> None:
        self.waits.clear()
        self.collectives.clear()

    def __enter__(self) -> Observer:
        listeners.append(self._note)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        listeners.remove(self._note)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:  # the operation on its local tensors follows, and is counted
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            result = func(*args, **kwargs)
            self._note_collective(func, args, result)
            return result
        if func in READS:
            if args[0].is_cuda:
                self._note("read")
            return value_like(args[0])
        result = func(*args, **kwargs)
        if func in COPIES:
            self._note_copy(func, args, kwargs, result)
        else:
            self._note_mixture(func, args, kwargs)
        return result

    def _note(self, what: str) -> None:
        self.waits[f"{what} in {place()}"] += 1

    def _note_copy(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        """Record a copy between host and GPU, unless it is asynchronous and uses pinned memory."""
        is_in_place = func is aten.copy_.default
        source = args[1] if is_in_place else args[0]
        if source.device.type == result.device.type:
            return
        host = source if result.is_cuda else result
        is_async = kwargs.get("non_blocking") or (is_in_place and len(args) > 2 and args[2])
        way = "to the GPU" if result.is_cuda else "to the host"
        if not is_async:
            self._note(f"blocking copy {way}")
        elif not is_pinned(host):
            self._note(f"copy of pageable memory {way}")

    def _note_mixture(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Record an operation on both host and GPU tensors, which torch allows for scalars."""
        kinds = {tensor.device.type for tensor in tensors_in((args, kwargs))}
        if len(kinds) > 1:
            self._note(f"{func.overloadpacket.__name__} of host and GPU")

    def _note_collective(self, func: Any, args: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        sizes = []
        for value in (*args, result):
            tensors = [t for t in tensors_in(value) if t.is_cuda]
            sizes.append(sum(tensor.nbytes for tensor in tensors))
        if name == "wait_tensor" or not any(sizes):
            return
        kind = f"{COLLECTIVES.get(name, name)} of {group_size(args)}"
        entry = self.collectives.setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += max(sizes)
