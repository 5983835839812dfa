"""The cores and memory of this machine limit the number of processes."""

import os

import pytest

from mingpt_ddp.distributed.device import machine
from mingpt_ddp.distributed.device.machine import check_processes
from mingpt_ddp.errors import ConfigError


@pytest.mark.parametrize(
    ("limit", "expected"), [("1048576\n", 1 << 20), ("max\n", None), (None, None)]
)
def test_a_container_has_less_memory_than_its_machine(limit, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    physical = machine.usable_memory()
    if limit is not None:
        machine.CGROUP_LIMIT.write_text(limit)
    assert 1 << 28 < physical < 1 << 45
    assert machine.usable_memory() == (expected or physical)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(machine, "machine_memory", lambda: 1 << 31)


def test_processes_are_bounded_by_the_cores(two_cores):
    check_processes("data.num_workers", 32)
    with pytest.raises(
        ConfigError,
        match=r"data.num_workers=33 must be at most 32 here, 16 for each of the 2 cores",
    ):
        check_processes("data.num_workers", 33)


def test_processes_that_others_start_count_too(two_cores):
    check_processes("data.num_workers", 8, n_parents=4)
    check_processes("data.num_workers", 1, n_parents=1000)  # one per rank is always allowed
    with pytest.raises(ConfigError, match="at most 8 here"):
        check_processes("data.num_workers", 9, n_parents=4)


def test_ranks_are_bounded_by_the_memory(two_cores):
    check_processes("ddp.nproc_per_node", 16, min_bytes=machine.MIN_RANK_BYTES)
    with pytest.raises(
        ConfigError, match=r"nproc_per_node=17 must be at most 16 here, for its 2.0 GiB of memory"
    ):
        check_processes("ddp.nproc_per_node", 17, min_bytes=machine.MIN_RANK_BYTES)
