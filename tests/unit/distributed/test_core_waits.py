"""Threads that wait for cores which other programs keep busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mingpt_ddp.distributed.core_waits import CoreWaits, describe_waits

ACCOUNT = Path("/proc/self/schedstat")  # nanoseconds run, and waited
needs_account = pytest.mark.skipif(
    not ACCOUNT.exists() or ACCOUNT.read_text().split()[0] == "0", reason="the kernel keeps none"
)


@pytest.fixture
def shared_core():
    """The only core of this process, on which another one never sleeps."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        yield
        other.kill()
    os.sched_setaffinity(0, cores)


@needs_account
def test_a_busy_core_is_reported_once(shared_core):
    waits = CoreWaits(threads=2, world_size=1)
    while (line := waits.check()) is None:
        pass
    assert line.startswith("fewer cores are free than this rank has threads (2): in ")
    assert waits.check() is None


@pytest.mark.parametrize(
    ("threads", "world_size", "waited_s", "advice"),
    [
        (2, 1, 0.03, None),  # noise
        (2, 1, 0.11, "OMP_NUM_THREADS=1"),
        (8, 2, 0.5, "OMP_NUM_THREADS=7"),
        (64, 1, 64 * 0.002, None),  # noise of each thread
        (64, 1, 31.0, "OMP_NUM_THREADS=2"),  # a container that may use one core
        (1, 1, 0.06, None),
        (1, 2, 0.2, "or train on fewer ranks here"),
        (1, 1, 0.2, "end what else runs on this machine"),
    ],
)
def test_what_to_do(threads, world_size, waited_s, advice):
    line = describe_waits(threads, world_size, waited_s, elapsed_s=0.5)
    assert (line is None) == (advice is None)
    assert line is None or line.endswith(advice)
    assert line is None or f"in 0.50 s they have waited {waited_s:.2f} s" in line
