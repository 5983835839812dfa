"""Communication hooks: how ranks average their gradients, if not by DDP's own all-reduce.

DDP calls a hook with one bucket of gradients after the other, in the same order on every rank, and gets the averages.
A hook keeps no state from step to step, so no snapshot has to hold it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.distributed.shared_memory import SharedMemoryGroup

ALIGNMENT = 64  # bytes
# Gradients are rounded to 16 bits, and so are their sums; fp16 has more digits, bf16 the range of fp32. By itself DDP
# accepts torch's bf16 hook only with NCCL, but gloo can add such numbers too.
HALF_PRECISION = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class CommHook:
    """A hook for DDP that measures its own time."""

    def __init__(self, all_reduce: Callable[[GradBucket], Future[Tensor]]) -> None:
        """
        Args:
            all_reduce: returns the average of a bucket over all ranks.
        """
        self.all_reduce = all_reduce
        self.seconds = 0.0  # in the latest backward pass, during which this thread computed no gradients

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the average of a bucket over all ranks."""
        start = time.perf_counter()
        future = self.all_reduce(bucket)
        self.seconds = time.perf_counter() - start + (self.seconds if bucket.index() else 0.0)
        return future


def make_comm_hook(ddp: DDPConfig, shared_memory: SharedMemoryGroup | None, model: nn.Module) -> CommHook | None:
    """Return the hook of the configuration; None for DDP's own all-reduce. A collective."""
    if ddp.comm_hook != "none":
        return CommHook(partial(HALF_PRECISION[ddp.comm_hook], None))  # type: ignore[arg-type]
    if shared_memory is not None:
        gradients = [p for p in model.parameters() if p.requires_grad]
        return CommHook(SharedMemoryAllReduce(shared_memory, gradients).all_reduce)
    return None


class SharedMemoryAllReduce:
    """Averages in memory that all ranks share.

    Ranks are added in their order, however gradients are bucketed. It waits for the last bucket: starting earlier
    gains nothing, because the cores that would copy the first buckets are computing the others.
    """

    def __init__(self, shared_memory: SharedMemoryGroup, parameters: list[nn.Parameter]) -> None:
        """
        Args:
            parameters: those that have gradients.
        """
        self.shared_memory = shared_memory
        self._memory = shared_memory.allocate(sum(p.numel() * p.element_size() + ALIGNMENT for p in parameters))
        self._buckets: list[tuple[Tensor, list[Tensor], Future[Tensor]]] = []
        self._end = 0  # of the buckets so far, in bytes

    def all_reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Copy the bucket to this rank's memory; the last one completes the futures of all."""
        if not self._buckets:
            self.shared_memory.recv_all(0)  # every rank has read the previous step's gradients
            self._end = 0
        buffer, begin = bucket.buffer(), self._end
        self._end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        parts = [memory[begin : begin + buffer.nbytes].view(buffer.dtype) for memory in self._memory]
        torch.mul(buffer, 1 / self.shared_memory.world_size, out=parts[self.shared_memory.rank])
        future: Future[Tensor] = Future()
        self._buckets.append((buffer, parts, future))
        if bucket.is_last():
            self._add_ranks()
        return future

    def _add_ranks(self) -> None:
        self.shared_memory.send_all(b"w")  # written
        self.shared_memory.recv_all(1)
        for buffer, parts, _ in self._buckets:
            torch.add(parts[0], parts[1], out=buffer)
            for part in parts[2:]:
                buffer += part
        self.shared_memory.send_all(b"r", skip=True)  # read
        for buffer, _, future in self._buckets:
            future.set_result(buffer)
        self._buckets.clear()
