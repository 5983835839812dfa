"""Freed memory stays in the process, and deterministic runs set what torch needs for them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from mingpt_ddp.distributed.device import device

SCRIPT = """
import resource, torch
from mingpt_ddp.distributed.device.device import keep_freed_memory
keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    [torch.ones(1 << 20) for _ in range(8)]  # 32 MB in pieces of 4 MB
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""
# Pages of memory that ten steps touch.
ALL_PAGES = 10 * 8192


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [({}, 0, 200), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, ALL_PAGES * 0.9, ALL_PAGES * 1.1)],
    ids=["kept", "a user's own settings"],
)
def test_freed_memory_is_reused(settings, least, most):
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={"PATH": "", **settings}, text=True, capture_output=True)
    assert least <= int(done.stdout) <= most, done.stderr


def test_a_sweep_on_a_gpu_may_have_a_deterministic_job_later(monkeypatch):
    """torch reads the variable at the first matmul of the process, whichever job that is in."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device.set_up_device(torch.device("cuda", 0), deterministic=False)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


def test_deterministic_runs_do_not_fill_new_tensors():
    try:
        device.set_up_device(torch.device("cpu"), deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        device.set_up_device(torch.device("cpu"), deterministic=False)
