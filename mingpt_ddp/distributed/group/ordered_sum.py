"""The sum of one flat tensor per micro-batch, in the order of their numbers, on all ranks.

Rank r of W computes the micro-batches r, r + W, r + 2 W and so on, so that round k has the numbers
from k W on. Each rank adds a slice of all tensors; at the end of a step it receives the others.

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


class SliceExchange:
    """How slices travel; on one rank they do not. All ranks call the methods in the same order."""

    def __init__(self, flat: Tensor, slice_sum: Tensor) -> None:
        """
        Args:
            flat: (W S) the tensor of this rank, then the sum.
            slice_sum: (S) the sum of this rank's slice.
        """
        self.flat = flat
        self.sum = slice_sum

    def begin(self) -> None:
        """Send `flat`, which must not change until `end`."""

    def receive(self) -> list[Tensor]:
        """Wait for this rank's slice (S) of the tensor of each rank."""
        return [self.flat]

    def end(self) -> None:
        """Wait until every rank has read what `receive` returned."""

    def gather(self) -> None:
        """Copy the `sum` of each rank to `flat`."""
        self.flat.copy_(self.sum)


class TorchExchange(SliceExchange):
    """all_to_all and all_gather of torch's process group."""

    def __init__(self, flat: Tensor, slice_sum: Tensor) -> None:
        super().__init__(flat, slice_sum)
        self._received = torch.empty_like(flat)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        self._work = dist.all_to_all_single(self._received, self.flat, async_op=True)

    def receive(self) -> list[Tensor]:
        assert self._work is not None
        self._work.wait()
        return list(self._received.split(len(self.sum)))

    def gather(self) -> None:
        dist.all_gather_into_tensor(self.flat, self.sum)


class SharedMemoryExchange(SliceExchange):
    """Each rank reads the others' memory: their tensors in a round, their sums at the end."""

    def __init__(self, shared_memory: SharedMemoryGroup, size: int, dtype: torch.dtype) -> None:
        """Allocate the memory. A collective.

        Args:
            size: S.
        """
        self._group = shared_memory
        rank = shared_memory.rank
        nbytes = size * dtype.itemsize
        flats = [m.view(dtype) for m in shared_memory.allocate(nbytes * shared_memory.world_size)]
        self._sums = [m.view(dtype) for m in shared_memory.allocate(nbytes)]
        self._slices = [flat[rank * size : (rank + 1) * size] for flat in flats]
        super().__init__(flats[rank], self._sums[rank])

    def begin(self) -> None:
        self._group.send_all(b"w")  # written

    def receive(self) -> list[Tensor]:
        self._group.recv_all(1)
        return self._slices

    def end(self) -> None:
        self._group.send_all(b"r")  # read
        self._group.recv_all(1)

    def gather(self) -> None:
        self._group.send_all(b"w")
        self._group.recv_all(1)
        torch.cat(self._sums, out=self.flat)
        self._group.send_all(b"r", skip=True)


def connect(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> SliceExchange:
    """Return the exchange of this group, for tensors of N elements. A collective."""
    W = group.world_size
    size = math.ceil(numel / (W * ALIGNMENT)) * ALIGNMENT
    if group.shared_memory is not None:
        return SharedMemoryExchange(group.shared_memory, size, dtype)
    flat = torch.zeros(W * size, dtype=dtype, device=device)
    slice_sum = torch.zeros(size, dtype=dtype, device=device)
    if W == 1:
        return SliceExchange(flat, slice_sum)
    return TorchExchange(flat, slice_sum)


class OrderedSum:
    """The sum of a step: each round `wait`, write to `flat`, `send`; then `total`."""

    def __init__(
        self, group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate its memory. A collective.

        Args:
            numel: N.
        """
        self._group = group
        with group.waiting():
            self._exchange = connect(group, numel, dtype, device)
        self.flat = self._exchange.flat  # (W S)
        self._is_first_round = True
        self._sent = 0  # tensors of the round that is under way

    def send(self, count: int) -> None:
        """Begin a round: send `flat`, which must not change until `wait`.

        Args:
            count: the ranks with a micro-batch in this round, the first ones.
        """
        self._exchange.begin()
        self._sent = count

    def wait(self) -> None:
        """Add the tensors of the round that is under way, if there is one."""
        if self._sent == 0:
            return
        with self._group.waiting():
            slices = self._exchange.receive()
        first, *others = slices[: self._sent]
        total = self._exchange.sum
        if self._is_first_round:
            total.copy_(first)  # added to zeros, -0.0 would become 0.0
        else:
            total += first
        for other in others:
            total += other
        with self._group.waiting():
            self._exchange.end()
        self._is_first_round = False
        self._sent = 0

    def total(self) -> Tensor:
        """Return the sum (W S) of the rounds since the last call, in `flat`."""
        self.wait()
        with self._group.waiting():
            self._exchange.gather()
        self._is_first_round = True
        return self.flat
