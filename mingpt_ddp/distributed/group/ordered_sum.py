"""Sum flat tensors of all ranks in a fixed order.

A step has one or more rounds. In a round, each rank sends one flat tensor. The sum of a step adds
these tensors round by round, and in each round in rank order. Every rank receives it.

ddp.reduction=fast has one round per step. ddp.reduction=canonical has a round for every W
micro-batches, where W is the number of ranks: rank r computes micro-batches r, r + W, r + 2 W and
so on. Round k then consists of micro-batches k W to k W + W - 1, so the micro-batches are added in
the order of their numbers.

Each rank adds up one slice of the tensors. At the end of a step, the ranks exchange their slices.

Source: the fixed order of gradients of Li et al. 2022, "EasyScale" (arXiv:2208.14228).

Shapes: W is the number of ranks, N the number of elements of a flat tensor, and S >= N / W the
number of elements of a slice.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.group.shared_memory import SharedMemoryGroup

# The number of elements of a slice is a multiple of this, so that slices begin at cache lines.
ALIGNMENT = 16


class Reducer:
    """Sum the tensors of a step.

    In each round, call `wait`, write to `flat`, and call `send`. At the end of the step, call
    `total`. All ranks call these methods in the same order.

    This class is for a single rank. Its subclasses send the slices between ranks.
    """

    def __init__(self, group: ProcessGroup, flat: Tensor, slice_sum: Tensor) -> None:
        """
        Args:
            flat: Buffer (W S) for the tensor of this rank.
            slice_sum: Buffer (S) for the sum of the slice that this rank adds up.
        """
        self._group = group
        self.flat = flat
        self._slice_sum = slice_sum
        self._is_first_round = True
        self._n_sent = 0  # number of tensors in the current round; 0 between rounds

    def send(self, count: int) -> None:
        """Begin a round: send `flat`, which must not change until `wait` or `total` returns.

        Args:
            count: Number of ranks that have a tensor in this round. These are the first ranks.
        """
        self._start_sending()
        self._n_sent = count

    def wait(self) -> None:
        """Finish the current round, if there is one: add its tensors to the sum."""
        if self._n_sent:
            self._add()
            with self._group.waiting():
                self._finish_round()

    def total(self) -> Tensor:
        """Finish the step. Return the sum (W S) of its rounds, which is valid until `send`."""
        self._add()
        self._is_first_round = True
        with self._group.waiting():
            return self._gather_sum()

    def _add(self) -> None:
        with self._group.waiting():
            slices = self._receive_slices()
        first, *others = slices[: self._n_sent]
        if self._is_first_round:
            self._slice_sum.copy_(first)  # added to zeros, -0.0 would become 0.0
        else:
            self._slice_sum += first
        for other in others:
            self._slice_sum += other
        self._is_first_round = False
        self._n_sent = 0

    def _start_sending(self) -> None:
        """Start to send `flat` to the other ranks."""

    def _receive_slices(self) -> list[Tensor]:
        """Wait for all ranks. Return the slice (S) of this rank from each of their tensors."""
        return [self.flat]

    def _finish_round(self) -> None:
        """Wait until every rank has added the slices of this round to its sum."""

    def _gather_sum(self) -> Tensor:
        """Wait until every rank has summed its slice. Return the whole sum (W S)."""
        return self._slice_sum


class TorchReducer(Reducer):
    """Exchange slices with all_to_all and all_gather of torch's process group."""

    def __init__(self, group: ProcessGroup, flat: Tensor, slice_sum: Tensor) -> None:
        super().__init__(group, flat, slice_sum)
        self._received = torch.empty_like(flat)
        self._work: dist.Work | None = None

    def _start_sending(self) -> None:
        self._work = dist.all_to_all_single(self._received, self.flat, async_op=True)

    def _receive_slices(self) -> list[Tensor]:
        assert self._work is not None
        self._work.wait()
        return list(self._received.split(len(self._slice_sum)))

    def _gather_sum(self) -> Tensor:
        dist.all_gather_into_tensor(self.flat, self._slice_sum)
        return self.flat


class SharedMemoryReducer(Reducer):
    """Hold the tensors of all ranks, and their sum, in memory that all ranks can read.

    A rank writes its next tensor only after all ranks have added its previous one. It writes to its
    slice of the sum only after all ranks have sent a tensor of the next step, because then they
    have read the sum of the last step.
    """

    def __init__(
        self, group: ProcessGroup, connections: SharedMemoryGroup, size: int, dtype: torch.dtype
    ) -> None:
        """Allocate the memory. A collective.

        Args:
            size: Number of elements of a slice (S).
        """
        W = group.world_size
        memory = connections.allocate((W + 1) * W * size * dtype.itemsize)
        *flats, total = memory.view(dtype).view(W + 1, W, size)
        super().__init__(group, flats[group.rank].view(-1), total[group.rank])
        self._connections = connections
        self._slices = [flat[group.rank] for flat in flats]
        self._total = total.view(-1)

    def _start_sending(self) -> None:
        self._connections.send_all(b"w")  # written

    def _receive_slices(self) -> list[Tensor]:
        self._connections.recv_all(1)
        return self._slices

    def _finish_round(self) -> None:
        self._connections.send_all(b"a")  # added
        self._connections.recv_all(1)

    def _gather_sum(self) -> Tensor:
        self._finish_round()
        return self._total


def build_reducer(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Reducer:
    """Build the reducer for the ranks of a group. A collective.

    Args:
        numel: Number of elements of each tensor (N).
    """
    W = group.world_size
    size = math.ceil(numel / (W * ALIGNMENT)) * ALIGNMENT
    if group.shared_memory is not None:
        with group.waiting():
            return SharedMemoryReducer(group, group.shared_memory, size, dtype)
    flat = torch.zeros(W * size, dtype=dtype, device=device)
    slice_sum = torch.zeros(size, dtype=dtype, device=device)
    cls = Reducer if W == 1 else TorchReducer
    return cls(group, flat, slice_sum)
