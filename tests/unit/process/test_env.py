"""The ranks that launchers set, and the GPU of each rank. The number of GPUs is faked."""

from __future__ import annotations

import pytest
import torch
from multiprocess.ranks import configure

from mingpt_ddp import distributed
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.device.device import device_of_rank, refuse_shared_gpus
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.env import DistEnv, read_env, worker_environ


@pytest.fixture
def device(monkeypatch):
    """Return a function that chooses the device of a rank.

    It takes the number of visible GPUs and the environment variables of the rank.
    """

    def choose(gpus: int, backend: str = "auto", **variables: str) -> str:
        config = from_mapping(configure("trainer.device=auto", f"ddp.backend={backend}"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name in ("RANK", "LOCAL_RANK", *SHARED, "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return str(device_of_rank(config.trainer, config.ddp, read_env()))

    return choose


SHARED = {"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# the environment of a parent that was started with RANK=5
MACHINE = DistEnv(rank=5, world_size=8, master_address=("127.0.0.1", 29500))


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
    with pytest.raises(
        ConfigError,
        match="local rank 2 has no GPU, because this machine has 2; start 2 ranks",
    ):
        device(2, **variables(2))


def test_each_process_may_see_only_its_own_gpu(device):
    """SLURM does this with --gpus-per-task=1.

    Processes below one parent all see the same GPU, and cannot share it.
    """
    variables = {**SHARED, "RANK": "1", "LOCAL_RANK": "1"}
    assert device(1, **variables) == "cuda:0"
    with pytest.raises(ConfigError, match="local rank 1 has no GPU, because this machine has 1"):
        device(1, **variables, TORCHELASTIC_RUN_ID="none")


def test_two_ranks_on_one_gpu_are_named():
    refuse_shared_gpus(["a", "b", "c"])
    with pytest.raises(
        ConfigError,
        match="ranks 1 and 2 have the same GPU; give each rank its own GPU with LOCAL_RANK",
    ):
        refuse_shared_gpus(["a", "b", "b"])


def test_ranks_of_gloo_share_gpus(device):
    ranks = [
        {**SHARED, "RANK": str(r), "LOCAL_RANK": str(r), "TORCHELASTIC_RUN_ID": "none"}
        for r in range(3)
    ]
    assert [device(1, "gloo", **rank) for rank in ranks] == ["cuda:0"] * 3
    assert [device(2, "gloo", **rank) for rank in ranks] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(("gpus", "expected"), [("0,1", ["cuda:0", "cuda:1"]), ("1", ["cuda:0"])])
def test_visible_gpus_are_numbered_from_zero(gpus, expected, device, monkeypatch):
    """torch numbers the devices in CUDA_VISIBLE_DEVICES from zero."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    variables = [{**SHARED, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(len(expected))]
    assert [device(len(expected), **each) for each in variables] == expected


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture
def mpirun(monkeypatch):
    """Return a function that reads the environment of Open MPI's mpirun with these changes."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)

    def read(**changes: str) -> DistEnv:
        for name, value in {**OPEN_MPI, **changes}.items():
            monkeypatch.setenv(name, value)
        return read_env()

    return read


def test_mpirun_on_several_machines(mpirun):
    env = mpirun(MASTER_ADDR="head", MASTER_PORT="1234")
    found = (env.rank, env.local_rank, env.world_size, env.master_address)
    assert found == (3, 1, 4, ("head", 1234))
    assert not env.is_standalone and env.has_local_rank and not env.has_agent


def test_mpirun_on_one_machine_needs_no_address(mpirun):
    assert mpirun(OMPI_COMM_WORLD_LOCAL_SIZE="4").master_address == ("localhost", 29500)
    with pytest.raises(
        ConfigError, match="which need the address of rank 0; pass -x MASTER_ADDR=HOST"
    ):
        mpirun(OMPI_COMM_WORLD_LOCAL_SIZE="2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, r"RANK=4 must lie in 0 .. WORLD_SIZE - 1 = 3"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT=65536 must lie below 65536"),
    ],
)
def test_mpirun_numbers_out_of_range_are_refused(mpirun, changes, message):
    with pytest.raises(ConfigError, match=message):
        mpirun(MASTER_ADDR="head", **changes)


def test_one_rank_of_mpirun_is_standalone(mpirun):
    assert mpirun(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0").is_standalone


def test_torchrun_has_precedence_over_mpirun(mpirun):
    env = mpirun(RANK="0", WORLD_SIZE="1")
    assert (env.rank, env.world_size) == (0, 1)


def test_ranks_for_user_code(monkeypatch):
    def ranks() -> tuple[int, int, int]:
        return distributed.get_rank(), distributed.get_local_rank(), distributed.get_world_size()

    variables = {"RANK": "5", "LOCAL_RANK": "1", **SHARED}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks() == (5, 1, 8)
    for name in variables:
        monkeypatch.delenv(name)
    assert ranks() == (0, 0, 1)
