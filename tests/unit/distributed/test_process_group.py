"""The backends of a process group. tests/multiprocess tests its collectives, over gloo."""

import pytest

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.group.process_group import check_ranks, name_backends
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


def test_tensor_parallel_must_divide_the_number_of_ranks():
    check_ranks(DDPConfig(tensor_parallel=2), 4)
    with pytest.raises(ConfigError, match="tensor_parallel=2 must divide the number of ranks, 3"):
        check_ranks(DDPConfig(tensor_parallel=2), 3)
