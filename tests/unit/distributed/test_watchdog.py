"""Detecting the rank that hangs from the heartbeats of all ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from launching import PATIENCE_S
from torch.distributed import HashStore

from mingpt_ddp.distributed import watchdog
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import FAILURE, ProcessExit
from mingpt_ddp.distributed.group.failures import Failures
from mingpt_ddp.distributed.watchdog import Watchdog
from mingpt_ddp.errors import UserError
from mingpt_ddp.linux import STOPPED, read_state


class Exited(BaseException):
    """Raised instead of the end of the process."""


@pytest.fixture
def find(monkeypatch, log_lines):
    """Return a function that looks for a hang at a second, by a rank, given count, beat and waiting
    of each rank, or None of one that has not written a heartbeat.

    It returns the error that is logged before the process ends, or None, and what is killed
    afterwards.
    """
    clock = {"now": 0.0}
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)

    def exit_process(error: UserError | None, code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(watchdog, "exit_process", exit_process)
    killed: list[str] = []

    def kill(env: DistEnv) -> None:
        assert log_lines, "killed before the reason was logged"
        killed.append("stopped siblings")

    monkeypatch.setattr(watchdog, "kill_stopped_siblings", kill)
    dogs = {}
    for by in (0, 1):
        group = SimpleNamespace(
            timeout_s=10.0, store=None, rank=by, is_rank_zero=by == 0, closed=threading.Event()
        )
        dogs[by] = Watchdog(group, ProcessExit())

    def find(
        second: float, *ranks: tuple[int, int, bool] | None, by: int = 0
    ) -> tuple[str | None, list[str]]:
        clock["now"] = second
        dog = dogs[by]
        dog._store = HashStore()
        dog.group.world_size = len(ranks)
        for rank, values in enumerate(ranks):
            if values is None:
                continue
            count, beat, waiting, *activity = values
            heartbeat = {
                "count": count,
                "beat": beat,
                "waiting": waiting,
                "activity": activity[0] if activity else "training",
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
    reason, _ = find(8.5, (1, 10, True), (1, 10, False))
    assert reason == "rank 1 has stalled for 8 s while training"


def test_rank_zero_is_watched_by_the_others(find):
    """They see no hang of another rank, and not that all wait: rank zero does."""
    assert find(0, (1, 1, True), (1, 1, False), by=1) == (None, [])
    assert find(9, (1, 10, True), (1, 10, False), by=1) == (None, [])
    assert find(9.5, (2, 11, False), (1, 11, False), by=1) == (None, [])
    reason, _ = find(18, (2, 20, False), (1, 20, False), by=1)
    assert reason == "rank 0 has stalled for 8 s while training"


def test_a_rank_stopped_before_its_first_heartbeat_is_named(find):
    assert find(0, (1, 1, True), None) == (None, [])
    reason, _ = find(8.5, (1, 10, True), None)
    assert reason == "rank 1 has stalled for 8 s while starting; its process does not respond"


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
    assert killed == ["stopped siblings"]


def test_a_rank_that_reads_behind_a_late_rank_is_not_blamed(find):
    """Ranks 0 and 2 wait for what rank 1 broadcasts, and have done so for longer."""
    waits, late = (1, 1, True), (1, 1, False)
    assert find(0, waits, late, waits) == (None, [])
    assert find(1, (1, 2, True), (2, 2, False), (1, 2, True)) == (None, [])
    assert find(8.5, (1, 9, True), (2, 9, False), (1, 9, True)) == (None, [])
    reason, _ = find(9.5, (1, 10, True), (2, 10, False), (1, 10, True))
    assert reason == "rank 1 has stalled for 8 s while training"


def test_a_rank_may_start_for_two_minutes(find):
    """It imports, on a busy machine; but a stopped one is found in time."""
    assert find(0, (1, 1, True), (1, 1, False, "starting")) == (None, [])
    assert find(120, (1, 61, True), (1, 61, False, "starting")) == (None, [])
    reason, _ = find(120.5, (2, 62, True), (1, 62, False, "starting"))
    assert reason == "rank 1 has stalled for 120 s while starting"


def test_a_rank_may_read_for_hours_but_not_stop(find):
    reads = (1, 1, False, "reading the data")
    assert find(0, reads, reads) == (None, [])
    assert find(10_000, (1, 2, *reads[2:]), (1, 2, *reads[2:])) == (None, [])
    reason, _ = find(10_008.5, (1, 3, *reads[2:]), (1, 2, *reads[2:]))
    assert reason is not None
    assert reason.endswith("while reading the data; its process does not respond")


def test_all_wait(find):
    assert find(0, (1, 1, True), (1, 1, True)) == (None, [])
    reason, _ = find(9, (1, 9, True), (1, 9, True))
    assert (
        reason == "all ranks have waited for each other for 9 s while training: check the network"
    )


@pytest.fixture
def leaves(monkeypatch):
    """Return a watchdog of rank 0, and a function that tells whether it ends its process at a
    second, with a heartbeat of the training thread.
    """
    clock = {"now": 0.0}
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock["now"])

    def exit_process(error: UserError | None, code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(watchdog, "exit_process", exit_process)
    group = SimpleNamespace(
        timeout_s=10.0,
        store=None,
        rank=0,
        world_size=2,
        is_writing=False,
        closed=threading.Event(),
    )
    dog = Watchdog(group, ProcessExit())
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
    Failures(dog._store, rank=1, world_size=2).record("broken")
    assert [leaves_at(now, first) for now in (60.25, 62)] == [False, False]
    assert [leaves_at(now, second) for now in (62.25, 64)] == [False, False]
    assert log_lines == []
    assert leaves_at(64.25, second)
    assert log_lines[0].startswith("ERROR rank 0 is blocked here after another rank failed:\n")
    assert log_lines[1:] == ["ERROR error: rank 1: broken"]


def test_a_blocked_rank_leaves_once_its_snapshot_is_written(leaves):
    dog, leaves_at = leaves
    Failures(dog._store, rank=1, world_size=2).record("broken")
    beat = {"count": 1}
    dog.group.is_writing = True
    assert [leaves_at(now, beat) for now in (0, 2, 20)] == [False] * 3
    dog.group.is_writing = False
    assert leaves_at(20.25, beat)


@pytest.mark.parametrize("reason", ["its own failure", "it is done"])
def test_a_rank_that_ends_by_itself_is_left_alone(leaves, reason):
    dog, leaves_at = leaves
    rank = 0 if reason == "its own failure" else 1
    Failures(dog._store, rank, world_size=2).record("broken")
    if reason == "it is done":
        dog.group.closed.set()
    assert [leaves_at(now, {}) for now in (0, 2, 20)] == [False] * 3


KILLER = """
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import kill_stopped_siblings
kill_stopped_siblings(DistEnv(has_agent={has_agent}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_only_a_stopped_process_of_the_same_agent_is_killed():
    """A shell has stopped processes of its own: the one with Ctrl-Z."""

    def call(has_agent: bool) -> None:
        killer = KILLER.format(has_agent=has_agent)
        subprocess.run([sys.executable, "-c", killer], check=True)

    stranger = (
        "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, "
        "flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stranger], stdout=subprocess.PIPE, text=True
    ) as sibling:
        child = int(sibling.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        call(has_agent=True)
        assert sibling.poll() is None
        assert read_state(child) == STOPPED
        os.kill(sibling.pid, signal.SIGSTOP)
        call(has_agent=False)
        assert read_state(sibling.pid) == STOPPED
        call(has_agent=True)
        assert sibling.wait(PATIENCE_S) == -signal.SIGKILL
        os.kill(child, signal.SIGKILL)
