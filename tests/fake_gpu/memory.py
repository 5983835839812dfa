"""Measure the peak memory of a training step on the fake GPU."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = 512  # block size of torch's allocator in bytes


class MemoryTracker(TorchDispatchMode):
    """Count the bytes of living storages on the GPU, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # bytes by the id of the storage
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # the operation on its local tensors follows, and is counted
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._alive[key] = weakref.ref(storage, lambda _: self._remove(key))
            self._sizes[key] = 0
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        rounded = -(-size // ROUNDING) * ROUNDING
        self.bytes += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peak = max(self.peak, self.bytes)

    def _remove(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
        del self._alive[key]

    @contextmanager
    def watching(self) -> Iterator["MemoryTracker"]:
        """Track memory in this context, including storages that FSDP resizes unseen by modes."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self._resize(id(storage), storage.nbytes())
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count), self:
            yield self
