"""The GPU of each rank, with a fake number of GPUs."""

from __future__ import annotations

import pytest
import torch
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.device import choose_device, refuse_shared_gpus
from mingpt_ddp.distributed.env import DistEnv, read_env, worker_environ
from mingpt_ddp.errors import ConfigError


@pytest.fixture
def device(monkeypatch):
    """Return a function that chooses the device for environment variables and a number of visible GPUs."""
    config = from_mapping(configure("trainer.device=auto"))

    def choose(gpus: int, **variables: str) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return str(choose_device(config.trainer, config.ddp, read_env()))

    return choose


SHARED = {"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MACHINE = DistEnv(rank=5, world_size=8, master_address=("127.0.0.1", 29500))  # whose parent was started with RANK=5


@pytest.mark.parametrize("launcher", ["torchrun", "by hand", "parent by hand"])
def test_each_local_rank_has_a_visible_gpu(launcher, device):
    """`CUDA_VISIBLE_DEVICES` is left to torch, which numbers the visible devices from 0."""

    def variables(local_rank: int) -> dict[str, str]:
        if launcher == "parent by hand":
            return worker_environ(MACHINE, local_rank, 3)
        agent = {"TORCHELASTIC_RUN_ID": "none"} if launcher == "torchrun" else {}
        return {**SHARED, **agent, "RANK": str(5 + local_rank), "LOCAL_RANK": str(local_rank)}

    assert device(0, **variables(1)) == "cpu"
    assert [device(2, **variables(local_rank)) for local_rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="local rank 2 has no GPU, this machine has 2; start 2 ranks or use the CPU"):
        device(2, **variables(2))


def test_a_gpu_shown_to_one_process_alone(device):
    """As SLURM does with --gpus-per-task=1; processes below one parent see the same, and cannot share it."""
    variables = {**SHARED, "RANK": "1", "LOCAL_RANK": "1"}
    assert device(1, **variables) == "cuda:0"
    with pytest.raises(ConfigError, match="local rank 1 has no GPU, this machine has 1"):
        device(1, **variables, TORCHELASTIC_RUN_ID="none")


def test_two_ranks_on_one_gpu_are_named():
    refuse_shared_gpus(["a", "b", "c"])
    with pytest.raises(ConfigError, match="ranks 1 and 2 have the same GPU; give each its own by LOCAL_RANK"):
        refuse_shared_gpus(["a", "b", "b"])
