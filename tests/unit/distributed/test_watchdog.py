"""Detecting the rank that hangs from the heartbeats of all ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from mingpt_ddp.distributed import exit as exit_module
from mingpt_ddp.distributed import watchdog
from mingpt_ddp.distributed.exit import FAILURE, ProcessExit
from mingpt_ddp.distributed.failures import FailureReports
from mingpt_ddp.distributed.watchdog import Watchdog


class Exited(BaseException):
    """Raised instead of the end of the process."""


@pytest.fixture
def find(monkeypatch, log_lines):
    """Return a function that looks for a hang at a second, given count, beat and waiting of each
    rank.

    It returns the error that is logged before the process ends, or None, and the ranks that are
    killed afterwards.
    """
    clock = {"now": 0.0}
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)

    def exit_process(message: str | None, code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(watchdog, "exit_process", exit_process)
    group = SimpleNamespace(timeout_s=10.0, store=None, rank=0)
    dog = Watchdog(group, ProcessExit(), lambda: False)
    killed: list[int] = []

    def kill(heartbeat: dict[str, Any]) -> None:
        assert log_lines, "killed before the reason was logged"
        killed.append(heartbeat["rank"])

    monkeypatch.setattr(dog, "_kill_if_local", kill)

    def find(second: float, *ranks: tuple[int, int, bool]) -> tuple[str | None, list[int]]:
        clock["now"] = second
        dog._store = HashStore()
        dog.group.world_size = len(ranks)
        for rank, (count, beat, waiting) in enumerate(ranks):
            heartbeat = {
                "rank": rank,
                "count": count,
                "beat": beat,
                "waiting": waiting,
                "activity": "training",
            }
            dog._store.set(f"heartbeat/{rank}", json.dumps(heartbeat))
        try:
            dog._check()
        except Exited:
            return log_lines[-1].removeprefix("ERROR error: "), killed
        return None, killed

    return find


def test_a_straggler_is_named(find):
    assert find(0, (1, 1, True), (1, 1, False)) == (None, [])
    assert find(8, (1, 9, True), (1, 9, False)) == (None, [])
    assert find(8.5, (1, 10, True), (1, 10, False)) == (
        "rank 1 has stalled for 8 s while training",
        [],
    )


@pytest.mark.parametrize("waiting", [False, True])
def test_a_stopped_process_is_killed(find, waiting):
    """Whether its training thread made progress until its last heartbeat, or was waiting before."""
    assert find(0, (1, 1, True), (1, 1, waiting)) == (None, [])
    assert find(0.5, (1, 2, True), (1, 2, waiting)) == (None, [])
    if waiting:
        assert find(8.25, (2, 9, True), (1, 2, waiting)) == (None, []), (
            "its last heartbeat was 7.75 s ago"
        )
    reason, killed = find(8.75 if waiting else 8.25, (3, 10, True), (1, 2, waiting))
    assert reason is not None
    assert reason.endswith("while training; its process does not respond")
    assert killed == [1]


def test_a_rank_that_reads_behind_a_late_rank_is_not_blamed(find):
    """Ranks 0 and 2 wait for what rank 1 broadcasts, and have done so for longer."""
    waits, late = (1, 1, True), (1, 1, False)
    assert find(0, waits, late, waits) == (None, [])
    assert find(1, (1, 2, True), (2, 2, False), (1, 2, True)) == (None, [])
    assert find(8.5, (1, 9, True), (2, 9, False), (1, 9, True)) == (None, [])
    reason, _ = find(9.5, (1, 10, True), (2, 10, False), (1, 10, True))
    assert reason == "rank 1 has stalled for 8 s while training"


def test_all_wait(find):
    assert find(0, (1, 1, True), (1, 1, True)) == (None, [])
    reason, killed = find(9, (1, 9, True), (1, 9, True))
    assert (
        reason == "all ranks have waited for each other for 9 s while training: check the network"
    )
    assert killed == []


@pytest.fixture
def leaves(monkeypatch):
    """Return a watchdog of rank 0, and a function that tells whether it ends its process at a
    second, with a heartbeat of the training thread.
    """
    clock = {"now": 0.0}
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock["now"])

    def exit_process(message: str | None, code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(exit_module, "exit_process", exit_process)
    dog = Watchdog(
        SimpleNamespace(timeout_s=10.0, store=None, rank=0, world_size=2),
        ProcessExit(),
        is_writing=lambda: dog.writes,
    )
    dog.writes = False
    dog._store = HashStore()

    def leaves(second: float, heartbeat: dict[str, Any]) -> bool:
        clock["now"] = second
        dog.group.heartbeat = heartbeat
        try:
            dog._leave_if_blocked()
        except Exited as exited:
            assert exited.args == (FAILURE,)
            return True
        return False

    return dog, leaves


def test_a_blocked_rank_leaves_after_a_failure_of_another(leaves, log_lines):
    """Two seconds after the failure and after its last sign of life, whichever is later."""
    dog, leaves_at = leaves
    first, second = {"count": 1}, {"count": 2}
    assert [leaves_at(now, first) for now in (0, 60)] == [False, False]
    FailureReports(dog._store, rank=1, world_size=2).report("broken")
    assert [leaves_at(now, first) for now in (60.25, 62)] == [False, False]
    assert [leaves_at(now, second) for now in (62.25, 64)] == [False, False]
    assert log_lines == []
    assert leaves_at(64.25, second)
    assert log_lines[0].startswith("ERROR rank 0 is blocked here after another rank failed:\n")
    assert log_lines[1:] == ["ERROR error: rank 1: broken"]


def test_a_blocked_rank_leaves_once_its_snapshot_is_written(leaves):
    dog, leaves_at = leaves
    FailureReports(dog._store, rank=1, world_size=2).report("broken")
    beat = {"count": 1}
    dog.writes = True
    assert [leaves_at(now, beat) for now in (0, 2, 20)] == [False] * 3
    dog.writes = False
    assert leaves_at(20.25, beat)


@pytest.mark.parametrize("reason", ["its own failure", "it is done"])
def test_a_rank_that_ends_by_itself_is_left_alone(leaves, reason):
    dog, leaves_at = leaves
    rank = 0 if reason == "its own failure" else 1
    FailureReports(dog._store, rank, world_size=2).report("broken")
    if reason == "it is done":
        dog.stop()
    assert [leaves_at(now, {}) for now in (0, 2, 20)] == [False] * 3


KILLER = """
import os, socket, sys
from types import SimpleNamespace
from mingpt_ddp.distributed.watchdog import Watchdog
dog = Watchdog(SimpleNamespace(timeout_s=10.0, store=None), None, None)
for pid in sys.argv[1:]:
    dog._kill_if_local({"host": socket.gethostname(), "pid": int(pid)})
"""


def test_only_a_process_of_the_same_parent_is_killed():
    """Anyone who reaches the store may write a heartbeat with any process id."""
    stranger = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, "
        "flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stranger], stdout=subprocess.PIPE, text=True
    ) as sibling:
        child = sibling.stdout.readline().strip()
        subprocess.run(
            [sys.executable, "-c", KILLER, "-1", "0", str(os.getpid()), child], check=True
        )
        os.kill(int(child), 0)  # still there
        assert sibling.poll() is None
        subprocess.run([sys.executable, "-c", KILLER, str(sibling.pid)], check=True)
        assert sibling.wait(10) == -signal.SIGKILL
        os.kill(int(child), signal.SIGKILL)
