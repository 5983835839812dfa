"""Fully sharded data parallelism: weights, gradients and optimizer state are divided over ranks by
rows.

Before a block computes, all ranks gather its weights; afterwards they free them. With `hsdp` groups
of ranks, one per node, hold the whole model each. Sources: Rajbhandari et al. 2020
(arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device import keep_freed_memory
from mingpt_ddp.distributed.process_group import ProcessGroup
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import ConfigError

T = TypeVar("T")
# larger blocks of CPU memory may hold gathered weights, which others could not reuse
GATHERED_BYTES = 1 << 20


class FSDPStrategy(Strategy):
    """Shard each of `model.blocks`, then the rest of the model as one."""

    is_sharded = shards_model = True

    def __init__(
        self, config: Config, device: torch.device, group: ProcessGroup, dtype: torch.dtype
    ) -> None:
        """
        Raises:
            ConfigError: the nodes of hsdp have different numbers of ranks.
        """
        super().__init__(config, device, group, compiles=False)
        self.name = config.ddp.strategy
        self.shards = group.world_size
        shape: tuple[int, ...] = (self.shards,)
        if self.name == "hsdp":
            self.shards = self._shards_per_replica()
            shape = (group.world_size // self.shards, self.shards)
        self._mesh = init_device_mesh(
            device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
        )
        self._row_rank = self._mesh.get_local_rank(len(shape) - 1)  # which part of the rows
        self._writes = group.rank < self.shards  # in the first replica
        if device.type == "cpu":
            keep_freed_memory(GATHERED_BYTES)
        self._half = dtype if dtype != torch.float32 else None  # type of the gathered weights

    def _shards_per_replica(self) -> int:
        """Return the ranks of a node; half of all on a single node."""
        hosts = self.group.all_gather(socket.gethostname())
        counts = {hosts.count(host) for host in hosts}
        half = self.group.world_size / 2
        size = half if len(set(hosts)) == 1 else max(counts)
        if len(counts) > 1 or size == 1 or size != int(size):
            raise ConfigError(
                "ddp.strategy=hsdp needs an even number of ranks on one node, or the same "
                "number of at least two on "
                f"every node, not {[hosts.count(host) for host in dict.fromkeys(hosts)]}; "
                "use ddp.strategy=fsdp"
            )
        return int(size)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model, one block at a time moved to the device.

        Raises:
            ConfigError: torch cannot split a parameter, such as a scalar.
        """
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)
        model = self._synchronize_batchnorm(model)
        # An evaluation leaves no weights gathered, which would stand in for the shards.
        shard = partial(fully_shard, mesh=self._mesh, reshard_after_forward=True)
        precision = MixedPrecisionPolicy(param_dtype=self._half, reduce_dtype=torch.float32)
        blocks = getattr(model, "blocks", None)
        norms = [
            module for module in model.modules() if self._half and hasattr(module, "running_mean")
        ]
        try:
            for norm in norms:  # batch normalization is in fp32, like its running statistics
                shard(norm)
            for module in [*(blocks if isinstance(blocks, nn.ModuleList) else []), model]:
                shard(module, mp_policy=precision)
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"ddp.strategy={self.name} cannot split the model: {reason}; or use zero1"
            ) from error
        return model

    def on_whole_model(
        self, model: nn.Module, build: Callable[[], nn.Module], work: Callable[[nn.Module], T]
    ) -> T:
        """Call `work` on rank zero, which alone keeps what all ranks gather.

        Return None elsewhere.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self.group.env.call_on_rank_zero(partial(tensors.setdefault, name, whole.cpu()))

        def call() -> T:
            copy = build()
            copy.load_state_dict(tensors)
            return work(copy.to(self.device))

        return cast(T, self.group.env.call_on_rank_zero(call))

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        norm = super().total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def part_to_write(self, name: str, tensor: Tensor) -> tuple[int, Tensor] | None:
        if isinstance(tensor, DTensor) and tensor.dim() == 0:
            tensor = tensor.full_tensor()
        if not isinstance(tensor, DTensor):  # the same on all ranks
            return self.group.env.call_on_rank_zero(lambda: (0, tensor))
        rows = tensor.to_local()
        return (self._first_row(tensor), rows) if self._writes and len(rows) else None

    def assemble(self, own: Tensor, read: Callable[[int, int], Tensor]) -> Tensor:
        if not isinstance(own, DTensor):
            return super().assemble(own, read)
        rows = own.to_local()
        first = self._first_row(own)
        new = read(first, first + len(rows)).to(rows.device)
        layout: dict[str, Any] = {"shape": own.shape, "stride": own.stride(), "run_check": False}
        return DTensor.from_local(new, own.device_mesh, own.placements, **layout)

    def _first_row(self, tensor: DTensor) -> int:
        """Return the first row of this rank: as torch.chunk divides them, the last parts may be
        smaller, or empty.
        """
        return min(tensor.shape[0], self._row_rank * -(-tensor.shape[0] // self.shards))
