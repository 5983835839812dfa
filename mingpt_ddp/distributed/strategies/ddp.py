"""The strategy ddp: torch's DistributedDataParallel (DDP) with a hook that reduces gradients."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp import torch_internals
from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.distributed.group.ordered_sum import build_reducer
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.base import WARMUP_PASSES, Strategy

ALL_REDUCE_EVENT = "all_reduce of gradients"  # name of this event in the profiler
TIMED_EVERY = 10  # DDP times every tenth step
# These hooks round gradients and their sums to 16 bits. fp16 has more precision, and bf16 has the
# range of fp32.
# DDP accepts torch's bf16 hook only with NCCL, although gloo can sum bf16 too.
BUILDERS["comm_hook"].update(
    fp16=default_hooks.fp16_compress_hook, bf16=default_hooks.bf16_compress_hook
)


@dataclass
class Bucket:
    """A bucket of gradients that are being averaged."""

    gradients: Tensor  # gradients of this rank, later their average
    part: slice  # position in the reducer's tensor
    future: Future[Tensor]


class BucketAverage:
    """Average all buckets of a step in one round of a reducer, in the order of ranks.

    It waits for the last bucket: starting earlier gains nothing, because the cores that would add
    the first buckets are still computing the gradients of the later ones.
    """

    def __init__(self, group: ProcessGroup, parameters: list[nn.Parameter]) -> None:
        """Allocate the memory. A collective.

        Args:
            parameters: The trained parameters, on the CPU.
        """
        self._world_size = group.world_size
        sizes = Counter[torch.dtype]()
        for parameter in parameters:
            sizes[parameter.dtype] += parameter.numel()
        self._reducers = {}
        for dtype, size in sizes.items():
            self._reducers[dtype] = build_reducer(group, size, dtype, torch.device("cpu"))
        self._buckets: list[Bucket] = []

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """Copy the bucket to the tensor of its type. The last bucket completes all futures."""
        gradients = bucket.buffer()
        dtype = gradients.dtype
        begin = sum(len(b.gradients) for b in self._buckets if b.gradients.dtype == dtype)
        part = slice(begin, begin + len(gradients))
        torch.mul(gradients, 1 / self._world_size, out=self._reducers[dtype].flat[part])
        future: Future[Tensor] = Future()
        self._buckets.append(Bucket(gradients, part, future))
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        totals = {}
        for dtype, reducer in self._reducers.items():
            reducer.send(self._world_size)
            totals[dtype] = reducer.total()
        for bucket in self._buckets:
            bucket.gradients.copy_(totals[bucket.gradients.dtype][bucket.part])
            bucket.future.set_result(bucket.gradients)
        self._buckets.clear()


class DDPStrategy(Strategy):
    """Average the gradients during the last backward pass of a step."""

    name = "ddp"
    allows_several_devices = True

    def __init__(
        self,
        ddp: DDPConfig,
        trainer: TrainerConfig,
        device: torch.device,
        group: ProcessGroup,
        compiles: bool,
    ) -> None:
        super().__init__(ddp, trainer, device, group, compiles)
        self.warmup_passes = WARMUP_PASSES + compiles
        self._iteration = 0  # number of backward passes that have reduced gradients
        # Seconds in the hook, by iteration. Recent iterations are kept, because the times that DDP
        # reports are from an earlier iteration.
        self._hook_s: dict[int, float] = {}

    def wrap(self, model: nn.Module, graphs: bool = False) -> nn.Module:
        ddp = self.ddp
        devices = {parameter.device for parameter in model.parameters()}
        on_one_gpu = self.device.type == "cuda" and devices == {self.device}
        parallel = DDP(
            super().wrap(model, graphs),
            device_ids=[self.device.index] if on_one_gpu else None,
            bucket_cap_mb=ddp.bucket_cap_mb,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
        )
        if self.compiles:
            # A graph with activation checkpointing cannot be split.
            torch_internals.cut_graph_at_buckets(
                parallel, not self.trainer.activation_checkpointing
            )
        torch_internals.keep_process_group(parallel)
        torch_internals.time_communication(parallel, TIMED_EVERY)
        if ddp.comm_hook != "none":
            parallel.register_comm_hook(
                partial(BUILDERS["comm_hook"][ddp.comm_hook], None), self._comm_hook
            )
        elif self.group.shared_memory is not None:
            trained = [p for p in model.parameters() if p.requires_grad]
            parallel.register_comm_hook(BucketAverage(self.group, trained).take, self._comm_hook)
        return parallel

    def _comm_hook(
        self, all_reduce: Callable[[GradBucket], Future[Tensor]], bucket: GradBucket
    ) -> Future[Tensor]:
        """Return the average of a bucket over all ranks, and measure the time.

        The order of the buckets is the same on every rank. Hooks have no state that a snapshot
        would have to hold.
        """
        if bucket.index() == 0:
            self.all_reduce_s = 0.0
            self._iteration += 1
            self._hook_s.pop(self._iteration - 2 * TIMED_EVERY, None)
        start = time.perf_counter()
        with torch.profiler.record_function(ALL_REDUCE_EVENT):
            future = all_reduce(bucket)
        self.all_reduce_s += time.perf_counter() - start
        self._hook_s[self._iteration] = self.all_reduce_s
        return future

    def maybe_no_sync(self, parallel_model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(parallel_model, DDP):
            return nullcontext()
        return parallel_model.no_sync()

    def comm_times(self, parallel_model: nn.Module) -> tuple[float, float]:
        times = torch_internals.communication_times(parallel_model)
        hidden_s = times.hidden_s
        if self.device.type == "cpu":  # DDP counts time in a hook as computation
            hidden_s = max(0.0, hidden_s - self._hook_s.get(times.iteration, 0.0))
        return times.total_s, max(0.0, times.total_s - hidden_s)
