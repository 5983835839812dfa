"""The launcher joins local workers, finds the failure that matters, and shares out the cores."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Barrier

import pytest

from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.launch.launcher import run_with_restarts
from mingpt_ddp.distributed.launch.workers import SignalForwarder, join_workers, shared_environ
from mingpt_ddp.process.exit import EX_TEMPFAIL, FAILURE, USER_ERROR
from mingpt_ddp.process.interrupts import SIGNALS

TERM, KILLED = signal.SIGTERM, -signal.SIGKILL
COMPLETE, PREEMPTED = {"status": "complete", "step": 9}, {"status": "preempted", "step": 5}


@pytest.mark.parametrize(
    ("before", "attempts", "preempted_code", "expected"),
    [
        (None, [(0, 0, COMPLETE)], 0, (0, False)),
        (None, [(1, 0, None), (0, 0, COMPLETE)], 0, (0, False)),
        (None, [(0, TERM, PREEMPTED)], 0, (0, True)),
        (None, [(0, TERM, PREEMPTED)], 143, (143, True)),
        (None, [(143, 0, PREEMPTED)], 143, (143, False)),  # the signal arrived on another node
        # The signal came after the last step.
        (PREEMPTED, [(0, TERM, COMPLETE)], 0, (0, True)),
        (PREEMPTED, [(0, TERM, COMPLETE)], 143, (0, True)),
        # The signal came before training, so an earlier result does not count.
        (None, [(0, TERM, None)], 0, (128 + TERM, True)),
        (COMPLETE, [(0, TERM, None)], 0, (128 + TERM, True)),
        # A user error is not retried.
        (None, [(USER_ERROR, 0, None)], 0, (USER_ERROR, False)),
        # All restarts are used up.
        (None, [(KILLED, 0, None), (1, 0, None)], 0, (FAILURE, False)),
        (None, [(EX_TEMPFAIL, 0, None)] * 2, 0, (USER_ERROR, False)),
    ],
    ids=str,
)
def test_the_exit_code_of_attempts(before, attempts, preempted_code, expected, tmp_path):
    """Each attempt is an exit code, a received signal, and the result that it writes before."""
    remaining = [*attempts]

    def write(result: dict | None) -> None:
        if result is not None:
            (tmp_path / "result.json").write_text(json.dumps(result))

    async def attempt(started_at: float) -> tuple[int, int]:
        code, received, result = remaining.pop(0)
        write(result)
        return code, received

    write(before)
    config = DDPConfig(max_restarts=1, preempted_exit_code=preempted_code)
    assert asyncio.run(run_with_restarts(attempt, 0.0, config, tmp_path)) == expected
    assert not remaining, "fewer attempts than expected"


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_local_workers_use_the_loopback_interface(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert shared_environ(2, True)[name] == ("lo0" if sys.platform == "darwin" else "lo")
    assert name not in shared_environ(2, False)
    monkeypatch.setenv(name, "eth0")
    assert shared_environ(2, True)[name] == "eth0", "the setting of the user was overwritten"


def test_workers_share_the_cores(monkeypatch):
    """Only the cores that this process may use are shared, not all cores of the machine."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [shared_environ(n, True)["OMP_NUM_THREADS"] for n in (1, 3, 9)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert shared_environ(2, True)["OMP_NUM_THREADS"] == "5"


def finish(ending: str, seconds: float, ready: Barrier) -> None:
    """Run a worker that ends in this way, `seconds` after all workers are `ready`."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a forked worker inherits the signal handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if ending == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif ending == "exits at SIGTERM":
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    ready.wait()
    time.sleep(seconds)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(ending) if ending.isdecimal() else 0)


def processes(
    *endings: tuple[str, float], together: bool = False
) -> list[multiprocessing.context.ForkProcess]:
    """Return a worker for each ending.

    Args:
        together: Start the clock of all workers once each of them is ready for signals.
    """
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(len(endings) if together else 1)
    return [
        context.Process(target=finish, args=(*ending, ready), name=f"rank {rank}")
        for rank, ending in enumerate(endings)
    ]


@pytest.fixture
def start_and_join():
    """Return a function that starts workers with the given endings and joins them.

    It returns the outcome and the workers' exit codes.
    """

    def join(
        *endings: tuple[str, float], timeout_s: float = 60, preempted_code: int = 0
    ) -> tuple[tuple[int, str], list[int | None]]:
        workers = processes(*endings, together=True)
        forwarder = SignalForwarder()
        with forwarder.installed(), forwarder.started(workers):
            ended = asyncio.run(join_workers(workers, timeout_s, preempted_code))
        assert not forwarder.received
        return ended, [worker.exitcode for worker in workers]

    return join


@pytest.mark.parametrize(
    ("endings", "options", "ended", "codes"),
    [
        ([("0", 0), ("0", 0.2)], {}, (0, ""), [0, 0]),
        # A preempted worker has not failed. The other worker may still be writing the result.
        ([("143", 0), ("143", 0.3)], {"preempted_code": 143}, (143, ""), [143, 143]),
        ([("143", 0), ("1", 0.3)], {"preempted_code": 143}, (1, "rank 1"), [143, 1]),
        # After a failure, the others get SIGTERM. A worker that does not exit in time is killed.
        ([("exits at SIGTERM", 600), ("1", 0.1)], {}, (1, "rank 1"), [0, 1]),
        ([("ignores SIGTERM", 600), ("2", 0.1)], {"timeout_s": 0.2}, (2, "rank 1"), [KILLED, 2]),
        # After one worker was killed, the others are killed at once.
        ([("ignores SIGTERM", 600), ("killed", 0.1)], {}, (KILLED, "rank 1"), [KILLED, KILLED]),
    ],
    ids=str,
)
def test_how_workers_end(endings, options, ended, codes, start_and_join):
    assert start_and_join(*endings, **options) == (ended, codes)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        (["1", "killed"], (-signal.SIGKILL, "rank 1")),
        (["1", "2"], (2, "rank 1")),
        (["75", "1"], (75, "rank 0")),
        (["0", "1"], (1, "rank 1")),
    ],
)
def test_the_root_cause_of_several_failures(endings, cause):
    """A death by signal comes first. Next come errors that a restart cannot fix, and storage that
    is unavailable.
    """
    workers = processes(*((ending, 0) for ending in endings))
    with SignalForwarder().started(workers):
        for worker in workers:
            worker.join()
        assert asyncio.run(join_workers(workers, 60, 0)) == cause


def test_the_store_process_is_watched_like_a_worker():
    workers = processes(("ignores SIGTERM", 60), ("0", 60))
    [store] = processes(("killed", 0.3))
    store.name = "the store"
    with SignalForwarder().started([*workers, store]):
        ended = asyncio.run(join_workers(workers, 60, 0, store))
    assert ended == (-signal.SIGKILL, "the store")
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2


def test_ignored_signals_stay_ignored():
    """For example, nohup makes a process ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        forwarder = SignalForwarder()
        with forwarder.installed():
            os.kill(os.getpid(), signal.SIGHUP)
            assert forwarder.received == []
    finally:
        signal.signal(signal.SIGHUP, before)
