"""One rank of a job whose other ranks do not exist: their collectives return at once."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from multiprocess.ranks import configure
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_gpu.device import GPUS, fake_cuda
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.distributed import process_group, runtime
from mingpt_ddp.distributed.env import DistEnv

# What of DDP reads values in C++, or needs a build with CUDA, and what it returns instead.
OF_DDP = (
    (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", None),
    (torch.nn.parallel.distributed, "_sync_module_states", None),
    (dist.Logger, "set_runtime_stats_and_log", None),
    (dist.Reducer, "_rebuild_buckets", False),
)


class FakeGroup(process_group.ProcessGroup):
    """Every rank says what this one says; tensors of the GPU go to torch's fake process group."""

    def _join(self, job_store: Any, devices: list[torch.device], ddp: DDPConfig) -> None:
        self.transport = "nccl"
        dist.init_process_group(
            "fake", store=FakeStore(), rank=self.rank, world_size=self.world_size
        )
        if ddp.tensor_parallel > 1:
            shape = (self.data_size, self.tensor_size)
            self.mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))

    def barrier(self) -> None: ...

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, value: Any, io: bool = False) -> list[Any]:
        if value == socket.gethostname():  # each node has its own
            return [f"node{rank // GPUS}" for rank in range(self.world_size)]
        return [value] * self.world_size

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.stack([values] * self.world_size)

    def any_in_copy(self, flag: bool) -> bool:
        return flag


def config_of(overrides: list[str]) -> Config:
    """Return a configuration on the GPU, eager unless the overrides say more."""
    return from_mapping(configure("trainer.device=cuda", "trainer.compile=false", *overrides))


@contextlib.contextmanager
def fake_rank(config: Config, world_size: int, rank: int = 0) -> Iterator[runtime.Runtime]:
    """Yield the runtime of a rank on the fake GPU."""
    env = DistEnv(rank=rank, local_rank=rank % GPUS, world_size=world_size)
    with ExitStack() as stack:
        mode = stack.enter_context(fake_cuda())
        stack.enter_context(mock.patch.object(runtime, "ProcessGroup", FakeGroup))
        for name in ("connect", "raise_if_fatal"):
            stack.enter_context(mock.patch.object(process_group, name, lambda *args: None))
        for target, name, result in OF_DDP:
            replacement = mock.patch.object(target, name, lambda *args, _=result, **options: _)
            stack.enter_context(replacement)
        try:
            of_rank = runtime.Runtime(config, env)
            with mode:
                yield of_rank
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
