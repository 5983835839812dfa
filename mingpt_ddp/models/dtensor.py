"""Tensors of which each rank holds a part: torch's DTensor, whose import takes half a second."""

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is torch's DTensor, without importing it."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a divided tensor, sharing its memory; others as they are."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a divided tensor; others as they are. A collective."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
