"""Data parallelism: the model in DistributedDataParallel, compiled if wanted, and its gradients averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.comm_hooks import CommHook, make_comm_hook
from mingpt_ddp.distributed.compile import compile_model, report_compile_errors
from mingpt_ddp.distributed.process_group import ProcessGroup

WARMUP_PASSES = 2  # after which DDP does not regroup its buckets any more
TIMED_EVERY = 10  # steps: DDP times its communication in one of them


class DDPStrategy:
    """How a model is trained by all ranks of a process group; a single rank just compiles it."""

    def __init__(self, config: Config, device: torch.device, group: ProcessGroup, compiles: bool) -> None:
        self.config, self.device, self.group, self.compiles = config, device, group, compiles
        self.comm_hook: CommHook | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model for training. All ranks get the weights of rank 0."""
        ddp = self.config.ddp
        if self.group.world_size > 1 and ddp.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        compiled = compile_model(model, self.config) if self.compiles else model
        if self.group.world_size == 1:
            return compiled
        parallel = DDP(
            compiled,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=ddp.bucket_cap_mb,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
        )
        if self.compiles:
            # A graph with activation checkpointing cannot be cut; outside of DDP the compiler finds no single graph.
            torch_internals.cut_graph_at_buckets(parallel, not self.config.trainer.activation_checkpointing)
        torch_internals.keep_process_group(parallel)
        torch_internals.time_communication(parallel, TIMED_EVERY)
        hook = self.comm_hook = make_comm_hook(ddp, self.group.shared_memory, model)
        if hook is not None:
            parallel.register_comm_hook(None, lambda state, bucket: hook(bucket))  # DDP wants a function
        return parallel

    def warm_up(self, parallel_model: nn.Module, forward: Callable[[], Tensor]) -> None:
        """Run throw-away backward passes, so that a resumed run adds up gradients as an uninterrupted one does.

        DDP regroups its buckets after the first backward, and with three or more ranks another grouping is another
        order of additions. The first pass compiles what is to be compiled; the second records CUDA graphs.

        Args:
            forward: returns the loss of a micro-batch.

        Raises:
            ConfigError: torch cannot compile the model.
        """
        if self.group.world_size == 1 and not self.compiles:
            return
        buffers = {name: buffer.clone() for name, buffer in parallel_model.named_buffers()}
        with report_compile_errors(self.config) if self.compiles else nullcontext():
            for _ in range(WARMUP_PASSES + self.compiles):
                self.group.barrier()
                self.begin_step()
                forward().backward()
                parallel_model.zero_grad(set_to_none=True)
        for name, buffer in parallel_model.named_buffers():
            buffer.copy_(buffers[name])

    def begin_step(self) -> None:
        """Let CUDA graphs overwrite what they returned in the last step."""
        if self.config.trainer.compile == "cuda_graphs":
            torch.compiler.cudagraph_mark_step_begin()

    def maybe_no_sync(self, parallel_model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Average gradients over ranks only in the last backward of a step."""
        return nullcontext() if last or not isinstance(parallel_model, DDP) else parallel_model.no_sync()

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, which are those that a snapshot holds."""
        if self.group.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def comm_times(self, parallel_model: nn.Module) -> tuple[float, float]:
        """Return the seconds of averaging gradients in the latest timed step, and those not hidden by computation."""
        if not isinstance(parallel_model, DDP):
            return 0.0, 0.0
        total, hidden = torch_internals.communication_times(parallel_model)
        if self.device.type == "cpu" and self.comm_hook is not None:  # DDP counts the work of a hook as computation
            hidden = max(0.0, hidden - self.comm_hook.seconds)
        return total, max(0.0, total - hidden)
