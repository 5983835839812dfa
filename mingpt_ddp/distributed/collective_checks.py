"""Every collective of torch.distributed, checked and timed.

An input holds its position modulo 1021 plus its rank. So every correct output is known in closed
form, exactly in fp32 on up to 4,000 ranks, and a value of another rank or position is noticed.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.ring import exchange, ring_all_reduce

PERIOD = 1021  # a prime, so that chunks of the usual sizes differ
ROOT = 0  # whose input is `positions`
# torch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rounded(size: int, ranks: int) -> int:
    """Return a size in bytes rounded down to whole elements per rank, but at least one."""
    row = ranks * torch.float32.itemsize
    return max(1, size // row) * row


class Message:
    """The tensors of one message size on this rank: one row of n elements per rank."""

    def __init__(self, rank: int, ranks: int, size: int, device: torch.device) -> None:
        """
        Args:
            size: in bytes; rounded by `rounded`.
        """
        self.rank = rank
        self.ranks = ranks
        n = rounded(size, ranks) // ranks // torch.float32.itemsize
        positions = torch.arange(ranks * n, device=device) % PERIOD
        self.positions = positions.float().view(ranks, n)
        self.input = self.positions + rank
        self.output = torch.empty_like(self.input)
        self.total = ranks * self.positions + ranks * (ranks - 1) / 2  # the sum of all inputs

    def rows(self, row: int) -> Tensor:
        """Return this row of the inputs of all ranks, (ranks, n)."""
        ranks = torch.arange(self.ranks, device=self.positions.device)
        return self.positions[row] + ranks[:, None]

    def at_root(self, rows: Any) -> Any:
        """Return the rows on the root, and none of them on other ranks."""
        return rows if self.rank == ROOT else rows[:0]


@dataclass(frozen=True)
class Operation:
    """A collective: what it does to a message, and what is expected of it."""

    call: Callable[[Message], object]  # the output starts as a copy of the input
    expected: Callable[[Message], Tensor]  # the first elements of the output
    # Bus bandwidth over algorithm bandwidth, in units of (ranks - 1) / ranks; 0: they are equal.
    shares: int = 0

    def factor(self, ranks: int) -> float:
        """Return the bus bandwidth over the algorithm bandwidth.

        Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if self.shares == 0:
            return 1.0
        return self.shares * (ranks - 1) / ranks


OPERATIONS = {
    "broadcast": Operation(lambda m: dist.broadcast(m.output, ROOT), lambda m: m.positions),
    "all_reduce": Operation(lambda m: dist.all_reduce(m.output), lambda m: m.total, shares=2),
    "reduce": Operation(lambda m: dist.reduce(m.output, ROOT), lambda m: m.at_root(m.total)),
    "gather": Operation(
        lambda m: dist.gather(m.input[0], m.at_root([*m.output]) or None, ROOT),
        lambda m: m.at_root(m.rows(0)),
        shares=1,
    ),
    "all_gather": Operation(
        lambda m: all_gather(m.output, m.input[:1]), lambda m: m.rows(0), shares=1
    ),
    "scatter": Operation(
        lambda m: dist.scatter(m.output[0], m.at_root([*m.input]) or None, ROOT),
        lambda m: m.positions[m.rank],
        shares=1,
    ),
    "reduce_scatter": Operation(
        lambda m: reduce_scatter(m.output[:1], m.input), lambda m: m.total[m.rank], shares=1
    ),
    "all_to_all": Operation(
        lambda m: dist.all_to_all_single(m.output, m.input), lambda m: m.rows(m.rank), shares=1
    ),
    "send_recv": Operation(
        lambda m: exchange(m.input, m.output), lambda m: m.positions + (m.rank - 1) % m.ranks
    ),
    "ring": Operation(lambda m: ring_all_reduce(m.output.view(-1)), lambda m: m.total, shares=2),
    "barrier": Operation(lambda m: dist.barrier(), lambda m: m.input[:0]),
}


@dataclass(frozen=True)
class Measurement:
    """An operation on messages of one size."""

    operation: str
    bytes: int  # of the whole message, as nccl-tests counts it; 0 for the barrier
    # The median over repetitions, on the slowest rank; None: the backend lacks the operation.
    latency_s: float | None
    algbw: float  # bytes / latency_s, in bytes per second
    busbw: float  # bytes per second of the busiest link, comparable to the speed of the hardware
    fault: str | None  # the first wrong value


def measure(
    group: ProcessGroup, device: torch.device, name: str, size: int, repetitions: int
) -> Measurement:
    """Check and time one of OPERATIONS on messages of `size` bytes.

    The result is the same on every rank.
    """
    operation = OPERATIONS[name]
    message = Message(group.rank, group.world_size, size, device)
    expected = operation.expected(message).flatten()
    result = message.output.view(-1)[: len(expected)]
    bytes_sent = message.input.nbytes if size else 0
    is_unsafe = name in ("send_recv", "ring") and group.transport == "gloo"
    fault = _check_barrier(group) if name == "barrier" else None
    times = []
    for _ in range(1 + repetitions):  # the first one opens connections
        message.output.copy_(message.input)
        _wait(device)
        group.barrier()
        start = time.perf_counter()
        try:
            if is_unsafe and device.type == "cuda":
                raise RuntimeError("gloo does not support sending tensors of a GPU, and crashes")
            operation.call(message)
        except RuntimeError as error:
            if "support" not in str(error):  # torch has no class of its own for this error
                raise
            return Measurement(name, bytes_sent, None, 0.0, 0.0, None)  # on every rank
        _wait(device)
        times.append(time.perf_counter() - start)
        if fault is None and not torch.equal(result, expected):
            at = int((result != expected).nonzero()[0])
            fault = f"position {at} is {float(result[at]):g} and not {float(expected[at]):g}"
            # The other ranks go on: do not leave the loop.
    latency_s = max(group.all_gather(statistics.median(times[1:])))
    first_fault = None
    for rank, of_rank in enumerate(group.all_gather(fault)):
        if of_rank and first_fault is None:
            first_fault = f"{name} of {bytes_sent} bytes is wrong on rank {rank}: {of_rank}"
    algbw = bytes_sent / latency_s
    busbw = algbw * operation.factor(group.world_size)
    return Measurement(name, bytes_sent, latency_s, algbw, busbw, first_fault)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_barrier(group: ProcessGroup) -> str | None:
    """Return what is wrong if a barrier ends before the last rank has begun it."""
    assert group.store is not None
    time.sleep(0.01 * (group.rank % 8))  # so that the ranks arrive one after the other
    group.store.add("arrived", 1)
    dist.barrier()
    arrived = group.store.add("arrived", 0)
    if arrived == group.world_size:
        return None
    return f"it ended after {arrived} of {group.world_size} ranks arrived"
