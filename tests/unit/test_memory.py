"""Freed memory stays with the process: the kernel is not asked for the same pages again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from mingpt_ddp.memory import keep_freed_memory
if sys.argv[1] == "kept":
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
@pytest.mark.parametrize("settings", [{}, {"MALLOC_ARENA_MAX": "4"}], ids=["default", "user's own"])
def test_no_page_is_asked_for_twice(settings):
    faults = {}
    for way in ("kept", "given back"):
        command = [sys.executable, "-c", SCRIPT, way]
        done = subprocess.run(command, env={"PATH": "", **settings}, text=True, capture_output=True, cwd=".")
        faults[way] = int(done.stdout)
    assert faults["given back"] > 10_000  # of 81,920 pages
    assert (faults["kept"] < 1000) == (not settings)
