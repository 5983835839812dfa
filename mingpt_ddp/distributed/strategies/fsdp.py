"""Fully sharded data parallelism: split weights, gradients and optimizer state by rows.

Before a block computes, all ranks gather its weights. Afterwards they free them. With `hsdp`, the
ranks of each node hold a copy of the model together.

Sources: Rajbhandari et al. 2020 (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch FSDP"
(arXiv:2304.11277).
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.device.device import keep_freed_memory
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.models.dtensor import is_dtensor, whole_tensor

# On a CPU, return freed blocks of this size or more to the kernel at once. They may have held
# gathered weights, and other allocations could not reuse them.
GATHERED_BYTES = 1 << 20


def shards_per_replica(ranks_per_node: list[int]) -> int:
    """Return the number of ranks that hold one copy of the model with hsdp.

    These are the ranks of a node. If there is only one node, they are half of its ranks.

    Args:
        ranks_per_node: Number of ranks on each node.

    Raises:
        ConfigError: The nodes have different numbers of ranks, or a copy would have one rank.
    """
    size = ranks_per_node[0] if len(ranks_per_node) > 1 else ranks_per_node[0] / 2
    if len(set(ranks_per_node)) > 1 or size == 1 or size != int(size):
        raise ConfigError(
            "ddp.strategy=hsdp needs an even number of ranks on one node, or the same number of "
            f"ranks, at least two on every node; the nodes have {ranks_per_node} ranks; use "
            "ddp.strategy=fsdp"
        )
    return int(size)


def check_no_scalars(strategy: str, dimensions: Mapping[str, int]) -> None:
    """Refuse a model with a parameter that has no rows.

    Args:
        dimensions: Number of dimensions of each parameter.

    Raises:
        ConfigError: A parameter is a scalar. The message names it.
    """
    scalars = [name for name, number in dimensions.items() if number == 0]
    if scalars:
        raise ConfigError(
            f"ddp.strategy={strategy} cannot split {scalars[0]}, a scalar; give it the "
            "shape (1,), or use ddp.strategy=zero1"
        )


@final
class FSDPStrategy(Strategy):
    """Shard each of `model.blocks`, then the rest of the model as one unit."""

    weights = "rows"
    optimizer_state = "rows"

    def __init__(
        self,
        ddp: DDPConfig,
        trainer: TrainerConfig,
        device: torch.device,
        group: ProcessGroup,
        compiles: bool,
    ) -> None:
        """
        Raises:
            ConfigError: The nodes of hsdp have different numbers of ranks.
        """
        super().__init__(ddp, trainer, device, group, compiles)
        self.name = ddp.strategy
        shape: tuple[int, ...] = (self.n_shards,)
        if self.name == "hsdp":
            self.n_shards = self._shards_per_replica()
            shape = (group.world_size // self.n_shards, self.n_shards)
        self._mesh = init_device_mesh(
            device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
        )
        self._row_rank = self._mesh.get_local_rank(len(shape) - 1)  # number of this rank's shard
        if device.type == "cpu":
            keep_freed_memory(GATHERED_BYTES)

    def _shards_per_replica(self) -> int:
        hosts = self.group.all_gather(socket.gethostname())
        return shards_per_replica(list(Counter(hosts).values()))

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        check_no_scalars(self.name, {n: p.dim() for n, p in model.named_parameters()})

    def prepare(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Shard the model. Only one block at a time is moved to the device as a whole.

        Raises:
            ConfigError: Torch cannot split a parameter, such as a scalar.
        """
        self._broadcast_weights(model)
        model = self._synchronize_batchnorm(model)
        # Free the gathered weights after an evaluation too, so that they never replace the shards.
        shard = partial(fully_shard, mesh=self._mesh, reshard_after_forward=True)
        half = dtype if dtype != torch.float32 else None  # type of the gathered weights
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        blocks = getattr(model, "blocks", None)
        try:
            for module in list(model.modules()):
                # Batch normalization computes in fp32, the type of its running statistics.
                if half and hasattr(module, "running_mean"):
                    shard(module)
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    shard(block, mp_policy=precision)
            shard(model, mp_policy=precision)
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"ddp.strategy={self.name} cannot split the model: {reason}; use ddp.strategy=zero1"
            ) from error
        return model

    def gather_weights(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Gather one tensor after the other. Only rank zero copies them to the CPU."""
        tensors: dict[str, Tensor] = {}

        def keep(name: str, whole: Tensor) -> None:
            tensors[name] = whole.cpu()

        for name, tensor in model.state_dict().items():
            self.group.env.call_on_rank_zero(partial(keep, name, whole_tensor(tensor)))
        return tensors

    def watch_gradients(self, model: nn.Module, take: Callable[[str, Tensor], None]) -> None:
        """Watch the gathered parameters, which a module has only while it computes."""
        # Gathered parameters by id. Torch uses the same parameter in every pass, so each is watched
        # only once.
        watched: dict[int, nn.Parameter] = {}

        def watch_gathered(prefix: str, module: nn.Module, inputs: Any) -> None:
            for name, parameter in module.named_parameters(prefix):
                is_new = not is_dtensor(parameter) and id(parameter) not in watched
                if is_new and parameter.requires_grad:
                    watched[id(parameter)] = parameter
                    parameter.register_hook(
                        lambda gradient, name=name: take(name, gradient.float())
                    )

        # The hooks in which torch gathers the parameters were registered before, and run first.
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(watch_gathered, name))

    # Every forward pass gathers weights from all ranks, and every backward pass reduces gradients.

    def passes(self, total: int) -> int:
        """Return the number of passes of the busiest rank. Every rank makes as many."""
        return math.ceil(total / self.group.data_size)

    def micro_batches(self, batch: list[MicroBatch], plan: BatchPlan) -> list[MicroBatch]:
        *before, last = super().micro_batches(batch, plan)
        if len(batch) == self.passes(plan.n_micro):
            return [*before, last]
        return [*before, replace(last, is_last=False), replace(last, scale=0.0)]

    def any_in_pass(self, flag: bool) -> bool:
        return any(self.group.all_gather(flag))

    def may_leave_passes(self, flag: bool) -> bool:
        return False  # the other ranks wait for this one

    def describe_gradient(self, name: str) -> str:
        return f"the gradient of {name}, averaged over ranks,"

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return whole_tensor(super().total_norm(gradients))

    def part_to_write(self, name: str, tensor: Tensor, writer: int) -> tuple[int, Tensor] | None:
        if tensor.dim() == 0:
            tensor = whole_tensor(tensor)
        if not is_dtensor(tensor):
            return super().part_to_write(name, tensor, writer)
        rows = tensor.to_local()
        return (self._first_row(tensor), rows) if len(rows) else None

    def assemble(self, own: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
        if not is_dtensor(own):
            return super().assemble(own, read)
        rows = own.to_local()
        first = self._first_row(own)
        new = read(first, first + len(rows)).to(rows.device)
        layout: dict[str, Any] = {"shape": own.shape, "stride": own.stride(), "run_check": False}
        return DTensor.from_local(new, own.device_mesh, own.placements, **layout)

    def _first_row(self, tensor: DTensor) -> int:
        """Return the first row of this rank's shard. Rows are split as torch.chunk splits them.

        The last shards may be smaller, or empty.
        """
        rows = tensor.shape[0]
        return min(rows, self._row_rank * math.ceil(rows / self.n_shards))
