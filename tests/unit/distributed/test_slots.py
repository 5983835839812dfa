"""Slots divide the cores and GPUs of a machine between concurrent jobs."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from mingpt_ddp.distributed.launch import slots
from mingpt_ddp.distributed.launch.slots import CORES_VARIABLE, bind_cores, divide


def test_slots_have_cores_and_gpus_of_their_own():
    found = divide(2, [0, 1, 4, 5, 6], 2, ["0", "1", "3", "GPU-7"])
    assert [slot.cores for slot in found] == [(0, 1), (4, 5)]
    assert [slot.gpus for slot in found] == [("0", "1"), ("3", "GPU-7")]
    assert found[1].environ() == {CORES_VARIABLE: "4,5", "CUDA_VISIBLE_DEVICES": "3,GPU-7"}


def test_slots_share_cores_if_there_are_too_few():
    assert [slot.cores for slot in divide(3, [2, 3], 1, None)] == [(2,), (3,), (2,)]
    # The sweep began on a machine with more cores.
    assert [slot.cores for slot in divide(2, [2, 3], 8, None)] == [(2, 3), (2, 3)]


def test_without_gpus_cuda_visible_devices_is_unchanged():
    assert "CUDA_VISIBLE_DEVICES" not in divide(1, [0], 1, None)[0].environ()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_worker_keeps_to_the_cores_of_its_slot():
    core = max(os.sched_getaffinity(0))
    queue = multiprocessing.get_context("fork").SimpleQueue()

    def worker() -> None:
        os.environ[CORES_VARIABLE] = str(core)
        bind_cores()
        queue.put((os.sched_getaffinity(0), CORES_VARIABLE in os.environ))

    process = multiprocessing.get_context("fork").Process(target=worker)
    process.start()
    process.join(60)
    assert queue.get() == ({core}, False)


@pytest.mark.parametrize(
    ("variable", "names"), [(None, ["0", "1"]), ("3,5,7", ["3", "5"]), ("", ["0", "1"])]
)
def test_gpus_have_the_names_of_the_environment(variable, names, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert slots.visible_gpus() == names
