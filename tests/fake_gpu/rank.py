"""Make one rank of a job whose other ranks do not exist. Its collectives return at once."""

from __future__ import annotations

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from fake_gpu.device import GPUS, fake_cuda
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed import runtime
from mingpt_ddp.distributed.group import process_group
from mingpt_ddp.process.env import DistEnv


class FakeGroup(process_group.ProcessGroup):
    """A group in which every rank has the values of this rank.

    Collectives of GPU tensors use torch's fake process group.
    """

    def connect(self, device: torch.device, ddp: DDPConfig) -> None:
        if self.world_size == 1:
            return
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

    def all_agree(self, value: Any) -> bool:
        return True

    def broadcast_json(self, value: Any) -> Any:
        return value

    def _gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def all_gather(self, value: Any) -> list[Any]:
        if value == socket.gethostname():  # each node has its own host name
            return [f"node{rank // GPUS}" for rank in range(self.world_size)]
        return [value] * self.world_size

    def all_gather_async(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.stack([values] * self.world_size)

    def any_in_copy(self, flag: bool) -> bool:
        return flag


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


slice_mesh = DeviceMesh.__getitem__


def _slice_mesh(mesh: DeviceMesh, name: Any) -> DeviceMesh:
    """Return a part of a mesh. Torch computes its ranks with real tensors."""
    with _disable_current_modes():
        return slice_mesh(mesh, name)


REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    (DeviceMesh, "__getitem__", _slice_mesh),
    (process_group, "join", _returning((None, None))),
    (runtime, "ProcessGroup", FakeGroup),
    # Parts of DDP that read values in C++ or need a build with CUDA.
    (dist.Logger, "set_runtime_stats_and_log", _returning(None)),
    (dist.Reducer, "_rebuild_buckets", _returning(False)),
    (torch.nn.parallel.distributed, "_sync_module_states", _returning(None)),
    (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", _returning(None)),
)


def config_of(overrides: list[str]) -> Config:
    """Return a configuration for the GPU, without compilation unless an override asks for it."""
    return from_mapping(configure("trainer.device=cuda", "trainer.compile=false", *overrides))


@contextlib.contextmanager
def fake_rank(config: Config, world_size: int, rank: int = 0) -> Iterator[runtime.Runtime]:
    """Yield the runtime of a rank on the fake GPU. In this context, all tensors are fake."""
    env = DistEnv(rank=rank, local_rank=rank % GPUS, world_size=world_size)
    with ExitStack() as stack:
        mode = stack.enter_context(fake_cuda())
        for target, name, value in REPLACEMENTS:
            stack.enter_context(mock.patch.object(target, name, value))
        deterministic = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        # These caches hold the rank's process groups, and its device for `cuda` without an index.
        stack.callback(_clear_sharding_prop_cache)
        stack.callback(FakeTensorMode.cache_clear)
        try:
            of_rank = runtime.Runtime(config, env)
            with mode:
                yield of_rank
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
