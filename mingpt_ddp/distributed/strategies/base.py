"""The base class of all strategies: what the train step, evaluation and snapshots may ask.

A model passes `prepare` before its optimizer is built and `wrap` before the first step. Then every
step calls `begin_step`, `maybe_no_sync` around each forward and backward pass, `reduce_gradients`,
`clip_grad_norm`, `update` and `broadcast_buffers`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.compile import compile_model, report_compile_errors
from mingpt_ddp.distributed.device import devices_of_rank
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.step_clock import StepClock
from mingpt_ddp.distributed.sync_batchnorm import synchronize
from mingpt_ddp.models.placement import split_blocks

T = TypeVar("T")
WARMUP_PASSES = 2  # after these DDP does not rebuild its buckets


class Strategy:
    """Each rank holds the whole state. The methods are those of one rank."""

    name = "single"
    is_sharded = False  # each rank writes and reads its own part of a snapshot
    # each rank holds a part of the weights, and every forward pass is a collective
    shards_model = False
    shards = 1  # parts of what is sharded

    def __init__(
        self, config: Config, device: torch.device, group: ProcessGroup, compiles: bool
    ) -> None:
        self.config = config
        self.device = device
        self.group = group
        self.compiles = compiles
        self.devices = devices_of_rank(device, config.model.devices)
        self.all_reduce_s = 0.0  # blocking all-reduce of the latest step
        self.clock = StepClock(device)
        # the first compiles, the second records CUDA graphs
        self.warmup_passes = WARMUP_PASSES + 1 if compiles else 0

    # The model.

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, with batch normalization over all ranks if requested.

        A collective.
        """
        return self._synchronize_batchnorm(split_blocks(model, self.devices))

    def _synchronize_batchnorm(self, model: nn.Module) -> nn.Module:
        return synchronize(model, self.device) if self.config.ddp.sync_batchnorm else model

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Change the parameter groups where a kernel needs it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a prepared model for training. All ranks receive the weights of rank zero."""
        return compile_model(model, self.config) if self.compiles else model

    def on_whole_model(
        self, model: nn.Module, build: Callable[[], nn.Module], work: Callable[[nn.Module], T]
    ) -> T:
        """Return the result of `work` for a model that holds all weights. A collective.

        Args:
            build: returns a new model on the CPU.
        """
        return work(model)

    # A step.

    def warm_up(self, parallel_model: nn.Module, forward: Callable[[], Tensor]) -> None:
        """Run warm-up passes, so that a resumed run sums gradients in the same order as an
        uninterrupted one.

        DDP rebuilds its buckets after the first backward, which changes the summation order on
        three or more ranks.

        Args:
            forward: returns the loss of a micro-batch.

        Raises:
            ConfigError: torch cannot compile the model.
        """
        buffers = {name: buffer.clone() for name, buffer in parallel_model.named_buffers()}
        with report_compile_errors(self.config) if self.compiles else nullcontext():
            for _ in range(self.warmup_passes):
                self.group.barrier()
                self.begin_step()
                forward().backward()
                parallel_model.zero_grad(set_to_none=True)
        for name, buffer in parallel_model.named_buffers():
            buffer.copy_(buffers[name])

    def begin_step(self) -> None:
        """Let CUDA graphs reuse the memory of their outputs of the last step."""
        if self.config.trainer.compile == "cuda_graphs":
            torch.compiler.cudagraph_mark_step_begin()

    def maybe_no_sync(self, parallel_model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Average gradients over ranks only in the last backward of a step."""
        return nullcontext()

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients over ranks, unless the backward pass has done so."""

    def clip_grad_norm(self, parameters: list[nn.Parameter], limit: float | None) -> Tensor:
        """Clip the gradients to a global norm; return their norm before."""
        norm = self.total_norm([p.grad for p in parameters if p.grad is not None])
        if limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients together."""
        return nn.utils.get_total_norm(gradients)

    def local(self, tensor: Tensor) -> Tensor:
        """Return what this rank holds of a gradient."""
        return tensor

    def update(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Take an optimizer step; afterwards all ranks have the same weights, or their parts of
        them.
        """
        scaler.step(optimizer)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of rank zero, which snapshots hold."""
        if self.group.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def comm_times(self, parallel_model: nn.Module) -> tuple[float, float]:
        """Return the seconds of gradient communication in the latest timed step: in total, and not
        overlapped.
        """
        return self.all_reduce_s, self.all_reduce_s

    # Snapshots, unless `is_sharded`.

    def join_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole tensors that a snapshot holds. A collective."""
        return tensors

    def split_tensors(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return what this rank holds of whole tensors: those of the model, or optimizer state
        `<parameter>:<name>`.
        """
        return tensors

    # Snapshots, if `is_sharded`. Rows are indices of a tensor's first dimension.

    def part_to_write(self, name: str, tensor: Tensor) -> tuple[int, Tensor] | None:
        """Return the first row and the rows that this rank writes of a tensor; None if it writes
        nothing of it.

        Args:
            name: of the parameter or buffer; the tensor may be optimizer state of it.
        """
        raise NotImplementedError

    def owns_state(self, name: str) -> bool:
        """Return whether this rank updates a parameter, or a part of it, and so needs its optimizer
        state.
        """
        return True

    def assemble(self, own: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
        """Return a tensor like `own` with other values.

        Args:
            read: returns the rows from the first to before the second, on the CPU.
        """
        return read(0, len(own) if own.dim() else 1)
