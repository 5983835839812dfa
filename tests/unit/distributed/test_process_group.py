"""Backends of a process group. tests/multiprocess has its collectives, over gloo."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.group import process_group
from mingpt_ddp.distributed.group.process_group import ProcessGroup, check_ranks, name_backends
from mingpt_ddp.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("auto", "cpu", ("gloo", "gloo")),
        ("gloo", "cpu", ("gloo", "gloo")),
        ("mpi", "cpu", ("mpi", "mpi")),
        ("auto", "cuda", ("cpu:gloo,cuda:nccl", "nccl")),
        ("nccl", "cuda", ("cpu:gloo,cuda:nccl", "nccl")),
        ("gloo", "cuda", ("cpu:gloo,cuda:gloo", "gloo")),
        ("mpi", "cuda", ("cpu:mpi,cuda:mpi", "mpi")),
    ],
)
def test_cpu_tensors_have_a_backend_of_their_own(backend, device, expected):
    assert name_backends(backend, device) == expected


@pytest.fixture
def joined(monkeypatch):
    """What torch is asked for: two ranks with the same GPU or GPUs cannot join on a machine
    without.
    """
    calls = []

    def join(env: DistEnv, job: int, timeout_s: float) -> tuple[None, None]:
        calls.append(("join", job, timeout_s))
        return None, None

    monkeypatch.setattr(process_group, "join", join)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backends, **k: calls.append((backends, k["timeout"]))
    )
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU {device.index}"),
    )
    monkeypatch.setattr(ProcessGroup, "all_gather", lambda self, value: [value, value])
    return calls


def join(backend: str) -> ProcessGroup:
    env = DistEnv(rank=1, world_size=2)
    config = DDPConfig(backend=backend)
    group = ProcessGroup(env, config, job=3)
    group.connect(torch.device("cuda", 0), config)
    return group


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_two_ranks_on_one_gpu_are_refused_before_nccl_fails(joined, backend):
    with pytest.raises(ConfigError, match="ranks 0 and 1 have the same GPU"):
        join(backend)


def test_two_ranks_share_a_gpu_over_gloo(joined):
    group = join("gloo")
    assert (group.transport, group.shared_memory) == ("gloo", None)
    timeout_s = DDPConfig().timeout_s
    assert joined == [
        ("join", 3, timeout_s),
        ("cpu:gloo,cuda:gloo", timedelta(seconds=timeout_s)),
    ]


def test_a_copy_of_the_model_has_as_many_ranks_as_asked():
    check_ranks(DDPConfig(tensor_parallel=2), 4)
    with pytest.raises(ConfigError, match="tensor_parallel=2 must divide the number of ranks, 3"):
        check_ranks(DDPConfig(tensor_parallel=2), 3)


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_waits_while_it_reads(before):
    """Afterwards it does what it did before; in a backward pass it goes on waiting."""
    group = ProcessGroup(DistEnv(), DDPConfig(), job=0)
    group.set_activity("evaluating", waiting=before)
    with group.waiting():
        assert group.heartbeat == {"count": 2, "activity": "evaluating", "waiting": True}
    assert group.heartbeat == {"count": 3, "activity": "evaluating", "waiting": before}
