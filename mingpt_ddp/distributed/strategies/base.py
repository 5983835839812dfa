"""The base class of all strategies, with the methods for training, evaluation and snapshots.

A run calls `prepare` on the model before it builds the optimizer, then `configure` on the optimizer
and `wrap` on the model. Every step calls `begin_step` and `micro_batches`. Around each forward and
backward pass it calls `maybe_no_sync`, and `finish` after it. Then come `clip_grad_norm` and
`update`. If a step is discarded, it calls `broadcast_buffers` instead of `update`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.device.compile import compile_model
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.step_clock import StepClock
from mingpt_ddp.distributed.strategies.sync_batchnorm import check_batchnorm, synchronize
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models import SupportsSeveralDevices, kept_buffers, move_model
from mingpt_ddp.models.dtensor import local_tensor
from mingpt_ddp.optim.muon import DividesWork
from mingpt_ddp.torch_internals import for_each

T = TypeVar("T")
# What a rank holds: everything; all tensors of the parameters that it owns; some rows of each
# tensor; or some rows or columns of the matrices that tensor parallelism splits.
Held: TypeAlias = Literal["whole", "owned", "rows", "columns"]
WARMUP_PASSES = 2  # DDP rebuilds its buckets in these passes, and not after them


class Strategy:
    """A way to train one model on several ranks. Each rank calls the methods of its own instance.

    This base class holds the whole model on each rank.
    """

    name = "single"
    # How a rank holds the weights, their average (trainer.ema) and their gradients.
    weights: Held = "whole"
    optimizer_state: Held = "whole"
    is_canonical = False  # a step has the same bits on any number of ranks
    allows_several_devices = False  # a model may place its layers on several devices of a rank

    def __init__(
        self,
        ddp: DDPConfig,
        trainer: TrainerConfig,
        device: torch.device,
        group: ProcessGroup,
        compiles: bool,
    ) -> None:
        self.ddp = ddp
        self.trainer = trainer
        self.device = device
        self.group = group
        # Number of ranks that hold the optimizer's state together. Each writes and reads its own
        # shard of a snapshot. 1 if rank zero holds all, or can gather it.
        self.n_shards = group.world_size if self.optimizer_state in ("owned", "rows") else 1
        self.compiles = compiles
        self.graphs = False  # the compiled model is replayed from CUDA graphs
        self.all_reduce_s = 0.0  # seconds that the latest step has waited for its all-reduces
        self._shares: dict[str, Tensor] = {}  # sums of this rank's losses and metrics in the step
        self.clock = StepClock(device)
        # With compilation, the first pass compiles and the second one records CUDA graphs.
        self.warmup_passes = WARMUP_PASSES + 1 if compiles else 0

    def check_start(self, micro_batch_size: int, recorded: Mapping[str, Any] | None) -> None:
        """Refuse a start that would change the bits of a run with ddp.reduction=canonical.

        A collective.

        Args:
            recorded: The state.json of the snapshot that the run resumes from. It is untrusted
                except for `micro_batch_size`. None if there is no snapshot.

        Raises:
            ConfigError: The bits would change. The message names the setting to change.
        """

    # The model.

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that this strategy cannot train.

        Raises:
            ConfigError: The message names the parameter or module that does not fit, or the keys to
                change.
        """
        if isinstance(model, SupportsSeveralDevices) and not self.allows_several_devices:
            raise ConfigError(
                f"{type(model).__name__} can use several devices per rank (to_devices), which "
                "needs ddp.strategy=ddp and ddp.reduction=fast; set both, or remove to_devices"
            )
        if self.ddp.sync_batchnorm and self.device.type == "cpu" and self.group.world_size > 1:
            check_batchnorm(model)

    def prepare(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model on the device, with batch normalization over all ranks if requested.

        A collective.

        Args:
            dtype: Type of matrix products.
        """
        return self._synchronize_batchnorm(move_model(model, self.device))

    def _synchronize_batchnorm(self, model: nn.Module) -> nn.Module:
        if not self.ddp.sync_batchnorm:
            return model
        return synchronize(model, self.device)

    def configure(self, optimizer: Optimizer) -> None:
        """Let an optimizer divide its work over the ranks if each rank updates all parameters."""
        if isinstance(optimizer, DividesWork):
            ranks = self.group.world_size if self.optimizer_state == "whole" else 1
            optimizer.divide_work(self.group.rank, ranks, self.group.waiting, self.is_canonical)

    def wrap(self, model: nn.Module, graphs: bool = False) -> nn.Module:
        """Wrap a prepared model for training. All ranks receive the weights of rank zero.

        Args:
            graphs: Replay the compiled model from CUDA graphs.
        """
        self.graphs = graphs
        if not self.compiles:
            return model
        return compile_model(model, self.device, self.trainer.deterministic, graphs)

    @staticmethod
    def _broadcast_weights(model: nn.Module) -> None:
        """Send the weights and buffers of rank zero to all ranks."""
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def watch(self, model: nn.Module, n_micro_batches: int) -> None:
        """Let the clock measure this rank's work in a step, unless its passes wait for other ranks.

        Args:
            n_micro_batches: Number of micro-batches in a step, over all ranks.
        """
        if not self.waits_in_passes:
            self.clock.attach(model, self.passes(n_micro_batches))

    def on_whole_model(
        self, model: nn.Module, build: Callable[[], nn.Module], work: Callable[[nn.Module], T]
    ) -> T:
        """Call `work` with a model that holds all weights, and return the result. A collective.

        If no rank holds all weights, rank zero alone calls `work`, and other ranks return None.

        Args:
            build: Builds a new model on the CPU.
        """
        if self.weights == "whole":
            return work(model)
        with self.group.waiting():
            tensors = self.gather_weights(model)

        def work_on_copy() -> T:
            copy = build()
            copy.load_state_dict(tensors)
            return work(copy.to(self.device))

        return cast(T, self.group.env.call_on_rank_zero(work_on_copy))

    def gather_weights(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return all weights on rank zero. A collective, called if no rank holds them all."""
        raise NotImplementedError

    def watch_gradients(self, model: nn.Module, take: Callable[[str, Tensor], None]) -> None:
        """Call `take` in each backward pass with the name and the gradient of each parameter.

        The gradient comes from this rank and this pass alone. Autograd calls `take` before it adds
        the gradient to the gradients of other passes, and before they are averaged over ranks.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(take, name))

    # The batch.

    @property
    def waits_in_passes(self) -> bool:
        """True if each forward and backward pass is a collective."""
        return self.ddp.sync_batchnorm or self.weights != "whole"

    def passes(self, total: int) -> int:
        """Return the number of passes of this rank, if all ranks together make `total`."""
        return len(range(self.group.data_rank, total, self.group.data_size))

    def micro_batches(self, batch: list[MicroBatch], plan: BatchPlan) -> list[MicroBatch]:
        """Return the micro-batches of this rank's passes, with the scales of their losses.

        If passes are collectives and other ranks have one more micro-batch, this rank repeats its
        last micro-batch with scale 0.
        """
        scale = self.loss_scale(plan)
        divisor = plan.n_micro * self.group.tensor_size  # ranks of a copy have equal losses
        passes = []
        for micro in batch:
            is_last = micro is batch[-1]
            passes.append(replace(micro, scale=scale, loss_divisor=divisor, is_last=is_last))
        return passes

    def loss_scale(self, plan: BatchPlan) -> float:
        """Return the factor by which a micro-batch's loss is multiplied before its backward pass.

        The loss of a step is the mean over its micro-batches. Later, the gradients are also
        averaged over ranks.
        """
        return self.group.data_size / plan.n_micro

    def any_in_pass(self, flag: bool) -> bool:
        """Return True if the flag is set on a rank that the next forward pass waits for."""
        return self.group.any_in_copy(flag)

    def may_leave_passes(self, flag: bool) -> bool:
        """Return True if the flag allows this rank to leave out its remaining passes."""
        return self.group.any_in_copy(flag)

    # A step.

    def warm_up(self, parallel_model: nn.Module, forward: Callable[[], Tensor]) -> None:
        """Run warm-up passes, so that a resumed run sums gradients in the same order.

        DDP rebuilds its buckets after the first backward, which changes the summation order on
        three or more ranks.

        Args:
            forward: Computes the loss of a micro-batch.
        """
        with kept_buffers(parallel_model):
            for _ in range(self.warmup_passes):
                self.group.barrier()
                self.begin_step()
                forward().backward()
                parallel_model.zero_grad(set_to_none=True)

    @property
    def metric_weight(self) -> float:
        """The weight of this rank when the metrics of a user's hook are averaged over ranks."""
        return 1.0

    def begin_step(self) -> None:
        """Clear the sums of the last step. Let CUDA graphs reuse the memory of their outputs."""
        self._shares = {}
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def maybe_no_sync(self, parallel_model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Average gradients over ranks only in the last backward of a step."""
        return nullcontext()

    def finish(
        self, micro: MicroBatch, shares: dict[str, Tensor], parameters: list[nn.Parameter]
    ) -> dict[str, Tensor]:
        """Add up a pass's share of the losses and metrics. Average gradients after the last pass.

        Args:
            shares: By name, the amount that this pass adds to each mean loss of the step, and to
                the sum and the count of each metric. Empty for a repeated micro-batch.

        Returns:
            The sums of this rank, complete after the last pass.
        """
        for name, share in shares.items():
            self._shares[name] = self._shares[name] + share if name in self._shares else share
        if micro.is_last:
            self.reduce_gradients(parameters)
        return self._shares

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients over ranks, unless the backward pass has averaged them."""

    @torch.no_grad()
    def clip_grad_norm(self, parameters: list[nn.Parameter], limit: float | None) -> Tensor:
        """Clip the gradients to a global norm, as torch does. Return the norm before clipping."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = self.total_norm(gradients)
        if limit is not None:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            parts = [local_tensor(gradient) for gradient in gradients]
            for device in dict.fromkeys(gradient.device for gradient in parts):
                members = [gradient for gradient in parts if gradient.device == device]
                for_each("mul_", members, factor.to(device))
        return norm.to(self.device)  # without gradients torch returns a CPU zero

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of the whole model."""
        return nn.utils.get_total_norm(gradients)

    def describe_gradient(self, name: str) -> str:
        """Describe a parameter's gradient before `reduce_gradients`, for a message."""
        return f"the gradient of {name}"

    def update(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Take an optimizer step, then broadcast the buffers of rank zero."""
        scaler.step(optimizer)
        self.broadcast_buffers(model)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank zero's buffers: forward passes change them, and snapshots hold them."""
        if self.group.world_size == 1:
            return
        with self.group.waiting():
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def comm_times(self, parallel_model: nn.Module) -> tuple[float, float]:
        """Return the seconds of gradient communication in the latest timed step.

        Returns:
            The total time, and the part of it that does not overlap with computation.
        """
        return self.all_reduce_s, self.all_reduce_s

    # Snapshots. A row is an index of a tensor's first dimension.

    def join_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors that a snapshot holds, or this rank's rows of them. A collective."""
        return tensors

    def split_tensors(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return this rank's share of whole tensors.

        Args:
            tensors: Tensors of the model by name, or of the optimizer's state by
                `<parameter>:<name>`.
        """
        return tensors

    def part_to_write(self, name: str, tensor: Tensor, writer: int) -> tuple[int, Tensor] | None:
        """Choose the rows of a tensor that this rank writes.

        Return the number of the first row, and the rows. Return None if it writes no rows.

        Args:
            name: Name of the parameter or buffer.
            tensor: Its values, or a tensor of its optimizer state.
            writer: The rank that writes the tensor if all ranks hold all of it.
        """
        return (0, tensor) if writer == self.group.rank else None

    def owns_state(self, name: str) -> bool:
        """Return True if this rank updates the parameter, or some rows of it."""
        return True

    def assemble(self, own: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
        """Build a tensor with the layout of `own` from values that `read` returns.

        Args:
            own: This rank's share of a tensor. Its values are ignored.
            read: Reads rows of the whole tensor to the CPU, from a first row up to, but not
                including, a second row.
        """
        return read(0, len(own) if own.dim() else 1)
