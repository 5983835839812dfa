"""Detecting the rank that hangs from the heartbeats of all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mingpt_ddp.distributed import watchdog
from mingpt_ddp.distributed.watchdog import Watchdog


@pytest.fixture
def find(monkeypatch):
    """Return a function that looks for a hang at a second, given count, beat and waiting of each rank."""
    clock = {"now": 0.0}
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock["now"])
    dog = Watchdog(SimpleNamespace(timeout_s=10.0, store=None))
    dog.killed = []
    monkeypatch.setattr(dog, "_kill_if_local", lambda heartbeat: dog.killed.append(heartbeat["rank"]))

    def find(second: float, *ranks: tuple[int, int, bool]) -> tuple[str | None, list[int]]:
        clock["now"] = second
        heartbeats: list[dict[str, Any]] = [
            {"rank": rank, "count": count, "beat": beat, "waiting": waiting, "activity": "training"}
            for rank, (count, beat, waiting) in enumerate(ranks)
        ]
        return dog._find_hang(heartbeats), dog.killed

    return find


def test_a_straggler_is_named(find):
    assert find(0, (1, 1, True), (1, 1, False)) == (None, [])
    assert find(8, (1, 9, True), (1, 9, False)) == (None, [])
    assert find(8.5, (1, 10, True), (1, 10, False)) == ("rank 1 has stalled for 8 s while training", [])


@pytest.mark.parametrize("waiting", [False, True])
def test_a_stopped_process_is_killed(find, waiting):
    """Whether its training thread made progress until its last heartbeat, or was waiting before."""
    assert find(0, (1, 1, True), (1, 1, waiting)) == (None, [])
    assert find(0.5, (1, 2, True), (1, 2, waiting)) == (None, [])
    if waiting:
        assert find(8.25, (2, 9, True), (1, 2, waiting)) == (None, []), "its last heartbeat was 7.75 s ago"
    reason, killed = find(8.75 if waiting else 8.25, (3, 10, True), (1, 2, waiting))
    assert reason is not None
    assert reason.endswith("while training; its process does not respond")
    assert killed == [1]


def test_all_wait(find):
    assert find(0, (1, 1, True), (1, 1, True)) == (None, [])
    reason, killed = find(9, (1, 9, True), (1, 9, True))
    assert reason == "all ranks have waited for each other for 9 s while training: check the network"
    assert killed == []


KILLER = """
import os, socket, sys
from types import SimpleNamespace
from mingpt_ddp.distributed.watchdog import Watchdog
dog = Watchdog(SimpleNamespace(timeout_s=10.0, store=None))
for pid in sys.argv[1:]:
    dog._kill_if_local({"host": socket.gethostname(), "pid": int(pid)})
"""


def test_only_a_process_of_the_same_parent_is_killed():
    """Anyone who reaches the store may write a heartbeat with any process id."""
    stranger = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", stranger], stdout=subprocess.PIPE, text=True) as sibling:
        child = sibling.stdout.readline().strip()
        subprocess.run([sys.executable, "-c", KILLER, "-1", "0", str(os.getpid()), child], check=True)
        os.kill(int(child), 0)  # still there
        assert sibling.poll() is None
        subprocess.run([sys.executable, "-c", KILLER, str(sibling.pid)], check=True)
        assert sibling.wait(10) == -signal.SIGKILL
        os.kill(int(child), signal.SIGKILL)
