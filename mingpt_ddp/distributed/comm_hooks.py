"""How the ranks take the mean of their gradients, where it is not DDP's own all-reduce.

A hook is given one bucket of gradients after the other, in the same order on every rank, and answers with their means.
It keeps nothing from step to step, so that no snapshot has to hold it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.distributed.shared_memory import SharedMemoryGroup

ALIGNED = 64  # bytes
WARMUP_PASSES = 2  # throw-away backward passes before the first step, see Runtime.warm_up


class CommHook:
    """What all hooks have."""

    seconds = 0.0  # spent on the buckets of the latest backward pass, in which this thread computed no gradients

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """`mean`, and the time that it takes."""
        began = time.perf_counter()
        future = self.reduce_bucket(bucket)
        self.seconds = time.perf_counter() - began + (self.seconds if bucket.index() else 0.0)
        return future

    def reduce_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The mean over the ranks of one bucket."""
        raise NotImplementedError


def make_hook(ddp: DDPConfig, shared_memory: SharedMemoryGroup | None, model: nn.Module) -> CommHook | None:
    """The hook that is wanted; None: DDP's own all-reduce. A collective.

    Args:
        shared_memory: where gradients may be exchanged in shared memory.
    """
    if ddp.comm_hook != "none":
        return HalfPrecisionAllReduce(ddp.comm_hook)
    if shared_memory is not None:
        return SharedMemoryAllReduce(shared_memory, [p for p in model.parameters() if p.requires_grad])
    return None


class SharedMemoryAllReduce(CommHook):
    """The mean, taken in memory that all ranks share.

    The order of the additions is that of the ranks, whatever the buckets are. Nothing is gained by beginning before the
    last bucket is there: the cores that would copy the first ones are those that compute the others.
    """

    def __init__(self, shared_memory: SharedMemoryGroup, parameters: list[nn.Parameter]) -> None:
        """
        Args:
            parameters: those that have gradients.
        """
        self.shared_memory = shared_memory
        size = sum(p.numel() * p.element_size() + ALIGNED for p in parameters)
        self._memory = shared_memory.shared_memory(size)
        self._buckets: list[tuple[Tensor, list[Tensor], Future[Tensor]]] = []
        self._end = 0  # of what the buckets so far take in memory

    def reduce_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """It is there when the last bucket is."""
        if not self._buckets:
            self.shared_memory.recv_all(0)  # all have read what was there before
            self._end = 0
        buffer = bucket.buffer()
        begin = self._end
        self._end += -(-buffer.nbytes // ALIGNED) * ALIGNED
        places = [memory[begin : begin + buffer.nbytes].view(buffer.dtype) for memory in self._memory]
        torch.mul(buffer, 1 / self.shared_memory.world_size, out=places[self.shared_memory.rank])
        future: Future[Tensor] = Future()
        self._buckets.append((buffer, places, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        self.shared_memory.send_all(b"w")  # written
        self.shared_memory.recv_all(1)
        for buffer, places, _ in self._buckets:
            torch.add(places[0], places[1], out=buffer)
            for place in places[2:]:
                buffer += place
        self.shared_memory.signal_all(b"r")  # read
        for buffer, _, future in self._buckets:
            future.set_result(buffer)
        self._buckets.clear()


class HalfPrecisionAllReduce(CommHook):
    """Half of the bytes: gradients are rounded to 16 bits, and so are their sums."""

    def __init__(self, kind: str) -> None:
        """
        Args:
            kind: fp16 has more digits, bf16 the range of fp32.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        # DDP takes torch's bf16 hook for NCCL alone, but gloo can add such numbers too.
        self._hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook

    def reduce_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self._hook(None, bucket)  # type: ignore[arg-type]
