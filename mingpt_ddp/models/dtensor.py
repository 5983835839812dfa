"""Handle torch's DTensor, a tensor that is sharded over ranks, without its slow import."""

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a tensor is a DTensor. Importing the class would take half a second."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares memory with it.

    Any other tensor is returned unchanged.
    """
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor from all ranks, in a collective call. Return other tensors unchanged."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
