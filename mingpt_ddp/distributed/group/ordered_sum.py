"""The sum of one flat tensor of each rank and round, in this order, on all ranks.

`fast` has one round a step. `canonical` has one a micro-batch: rank r of W computes the numbers r,
r + W, r + 2 W and so on, so that round k has those from k W on, and the sum is in their order.
Each rank adds a slice of all tensors; at the end of a step all receive the slices of the others.

Source: the fixed order of gradients of Li et al. 2022, "EasyScale" (arXiv:2208.14228).

Shapes: W ranks, N elements of a flat tensor, S >= N / W of a slice.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.group.shared_memory import SharedMemoryGroup

ALIGNMENT = 16  # elements of a slice: a multiple of a cache line


class Reducer:
    """The sum of a step: each round `wait`, write to `flat`, `send`; then `total`.

    All ranks call the methods in the same order. This class is that of a single rank; the others
    differ in how the slices travel.
    """

    def __init__(self, group: ProcessGroup, flat: Tensor, slice_sum: Tensor) -> None:
        """
        Args:
            flat: (W S) the tensor of this rank.
            slice_sum: (S) the sum of this rank's slice.
        """
        self._group = group
        self.flat = flat
        self._sum = slice_sum
        self._is_first_round = True
        self._sent = 0  # tensors of the round that is under way

    def send(self, count: int) -> None:
        """Begin a round: send `flat`, which must not change until `wait` or `total`.

        Args:
            count: the ranks with a tensor in this round, the first ones.
        """
        self._begin()
        self._sent = count

    def wait(self) -> None:
        """Add the tensors of the round that is under way, if there is one."""
        if self._sent:
            self._add()
            with self._group.waiting():
                self._end()

    def total(self) -> Tensor:
        """Return the sum (W S) of the rounds since the last call, to read until the next `send`."""
        self._add()
        self._is_first_round = True
        with self._group.waiting():
            return self._gather()

    def _add(self) -> None:
        with self._group.waiting():
            slices = self._receive()
        first, *others = slices[: self._sent]
        if self._is_first_round:
            self._sum.copy_(first)  # added to zeros, -0.0 would become 0.0
        else:
            self._sum += first
        for other in others:
            self._sum += other
        self._is_first_round = False
        self._sent = 0

    def _begin(self) -> None:
        """Send `flat`."""

    def _receive(self) -> list[Tensor]:
        """Wait for this rank's slice (S) of the tensor of each rank."""
        return [self.flat]

    def _end(self) -> None:
        """Wait until every rank has added what `_receive` returned."""

    def _gather(self) -> Tensor:
        """Wait until every rank has added its slice; return all of the sum."""
        return self._sum


class TorchReducer(Reducer):
    """Send slices by all_to_all and all_gather of torch's process group."""

    def __init__(self, group: ProcessGroup, flat: Tensor, slice_sum: Tensor) -> None:
        super().__init__(group, flat, slice_sum)
        self._received = torch.empty_like(flat)
        self._work: dist.Work | None = None

    def _begin(self) -> None:
        self._work = dist.all_to_all_single(self._received, self.flat, async_op=True)

    def _receive(self) -> list[Tensor]:
        assert self._work is not None
        self._work.wait()
        return list(self._received.split(len(self._sum)))

    def _gather(self) -> Tensor:
        dist.all_gather_into_tensor(self.flat, self._sum)
        return self.flat


class SharedMemoryReducer(Reducer):
    """Hold the tensors of all ranks and their sum in memory that all ranks read.

    A rank writes to its tensor once all have added the previous one, and to its slice of the sum
    once all have sent a tensor of the next step: then they have read the sum.
    """

    def __init__(
        self, group: ProcessGroup, connections: SharedMemoryGroup, size: int, dtype: torch.dtype
    ) -> None:
        """Allocate the memory. A collective.

        Args:
            size: S.
        """
        W = group.world_size
        memory = connections.allocate((W + 1) * W * size * dtype.itemsize)
        *flats, total = memory.view(dtype).view(W + 1, W, size)
        super().__init__(group, flats[group.rank].view(-1), total[group.rank])
        self._connections = connections
        self._slices = [flat[group.rank] for flat in flats]
        self._total = total.view(-1)

    def _begin(self) -> None:
        self._connections.send_all(b"w")  # written

    def _receive(self) -> list[Tensor]:
        self._connections.recv_all(1)
        return self._slices

    def _end(self) -> None:
        self._connections.send_all(b"a")  # added
        self._connections.recv_all(1)

    def _gather(self) -> Tensor:
        self._end()
        return self._total


def build_reducer(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Reducer:
    """Return the reducer of this group, for tensors of N elements. A collective."""
    W = group.world_size
    size = math.ceil(numel / (W * ALIGNMENT)) * ALIGNMENT
    if group.shared_memory is not None:
        with group.waiting():
            return SharedMemoryReducer(group, group.shared_memory, size, dtype)
    flat = torch.zeros(W * size, dtype=dtype, device=device)
    slice_sum = torch.zeros(size, dtype=dtype, device=device)
    cls = Reducer if W == 1 else TorchReducer
    return cls(group, flat, slice_sum)
