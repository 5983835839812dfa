"""Kill or stop each process of a local run at each stage of the run.

The run must restart and log a line that names the process. It must leave no processes, and have the
bits of the undisturbed run. With STAGES_REPORT=FILE, each case adds its outcome and its duration to
the file, as a line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PATIENCE_S
from random_faults import processes_in
from stages import (
    STAGES_AFTER_RESULT,
    Case,
    HeldJob,
    Outcome,
    add_to_report,
    describe,
    in_time,
    last_bits,
    run_undisturbed,
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]
CTRL_C_INTERVAL_S = 0.5

KILLED = r"rank {} was killed by SIGKILL"
# The message depends on who notices first: the launcher, a watchdog or the rendezvous.
STOPPED = r"rank {} (has been stopped|has stalled|did not join)"
STORE = "the store"
SERVER = "the fork server"
RANK_STAGES = ("forked", "connects", "joined", "first step", "saving", "complete", "exit")
STAGES = ("imports", *RANK_STAGES)


def killed(rank: int, stage: str, launcher: str = "forkserver") -> Case:
    return Case(f"rank {rank}", stage, "KILL", KILLED.format(rank), launcher)


def stopped(rank: int, stage: str, launcher: str = "forkserver") -> Case:
    return Case(f"rank {rank}", stage, "STOP", STOPPED.format(rank), launcher)


RANKS = [
    *(fault(1, stage) for stage in RANK_STAGES for fault in (killed, stopped)),
    *(fault(0, stage) for stage in ("forked", "connects") for fault in (killed, stopped)),
    *(stopped(0, stage) for stage in ("joined", "first step", "saving", "complete", "exit")),
    *(Case("ranks", stage, "STOP", STOPPED.format(r"\d")) for stage in ("forked", "first step")),
    killed(1, "forked", "spawn"),
    stopped(1, "forked", "spawn"),
    stopped(0, "connects", "spawn"),
    stopped(1, "exit", "spawn"),
]
TORCHRUN = [
    # The agent names a killed worker only when it gives up.
    Case("rank 0", "connects", "KILL", launcher="torchrun"),
    Case("rank 1", "connects", "KILL", launcher="torchrun"),
    stopped(0, "connects", "torchrun"),
    stopped(1, "connects", "torchrun"),
    stopped(1, "joined", "torchrun"),
]
STORES = [
    *(Case("store", stage, "KILL", STORE) for stage in ("hosts", *RANK_STAGES)),
    Case("store", "hosts", "KILL", STORE, "spawn"),
]
SERVERS = [
    *(Case("fork server", stage, "KILL", SERVER) for stage in STAGES),
    Case("fork server", "first step", "KILL", SERVER, "new processes"),
]
LOADERS = [
    Case("loader of rank 1", "first step", "KILL", "rank 1: .*DataLoader worker"),
    Case("loader of rank 1", "first step", "STOP", "rank 1 has (stalled|been stopped)"),
    Case("loader of rank 0", "saving", "KILL", "rank 0: .*DataLoader worker"),
    Case("loader of rank 0", "saving", "STOP", "rank 0 has (stalled|been stopped)"),
]
LAUNCHERS = [
    *(Case("launcher", stage, "KILL") for stage in STAGES),
    Case("launcher", "imports", "KILL", launcher="new processes"),
    Case("launcher", "forked", "KILL", launcher="spawn"),
    Case("launcher", "joined", "KILL", launcher="spawn"),
]
TERMINATED = [
    *(Case("rank 1", stage, "TERM") for stage in RANK_STAGES),
    Case("rank 0", "first step", "TERM"),
    *(Case("ranks", stage, "TERM") for stage in ("connects", "first step")),
    Case("store", "connects", "TERM"),
    Case("store", "first step", "TERM"),
    Case("fork server", "imports", "TERM"),
    Case("fork server", "first step", "TERM"),
    Case("rank 1", "connects", "TERM", launcher="spawn"),
]
INTERRUPTED = [
    *(Case("none", stage, "INT INT") for stage in STAGES),
    *(Case("rank 1", stage, "INT INT") for stage in RANK_STAGES),
    Case("ranks", "first step", "INT INT"),
    Case("store", "hosts", "INT INT"),
    Case("store", "joined", "INT INT"),
    Case("store", "first step", "INT INT"),
    Case("fork server", "imports", "INT INT"),
    Case("fork server", "connects", "INT INT"),
    Case("fork server", "saving", "INT INT"),
    Case("rank 1", "first step", "INT INT", launcher="spawn"),
]
# The quickest and most informative cases. All others are slow tests.
CHOSEN = {
    "STOP rank 1, forked",
    "KILL rank 0, connects",
    "STOP rank 0, connects",
    "KILL rank 1, joined",
    "STOP rank 1, exit",
    "STOP rank 1, connects, torchrun",
    "KILL store, hosts",
    "KILL fork server, joined",
    "TERM fork server, first step",
    "STOP loader of rank 1, first step",
    "KILL launcher, saving",
    "TERM ranks, first step",
    "INT INT rank 1, joined",
}


def each(cases: list[Case]) -> list:
    """Return the cases as parameters of a test, with their marks."""
    parameters = []
    for case in cases:
        marks = [] if str(case) in CHOSEN else [pytest.mark.slow]
        parameters.append(pytest.param(case, id=str(case), marks=marks))
    return parameters


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that runs a case without its fault and returns the bits."""
    done = {}

    def get(case: Case):
        key = " ".join(case.settings)
        if key not in done:
            cwd = tmp_path_factory.mktemp("undisturbed")
            assert run_undisturbed(case, cwd) == 0
            done[key] = last_bits(cwd)
            assert len(done[key][1]) == 2, "model and optimizer"
        return done[key]

    return get


@contextlib.contextmanager
def held(case: Case, cwd: Path) -> Iterator[tuple[HeldJob, Outcome]]:
    """Start the run of a case and wait until it is held. At the end, report the outcome and kill
    the remaining processes.
    """
    outcome = Outcome(case.process, case.stage, case.signal, case.launcher)
    job = HeldJob(case, cwd)
    try:
        job.wait_until_held()
        yield job, outcome
    finally:
        outcome.exit_code = job.job.process.poll()
        if outcome.bits is None:
            outcome.left = [describe(pid) for pid in processes_in(cwd)]
        add_to_report(outcome)
        job.kill_all()


def check_end(job: HeldJob, outcome: Outcome, reference) -> None:
    """Check that no process is left. Complete the run if necessary, and compare its bits."""
    assert in_time(job.is_over, PATIENCE_S), [describe(pid) for pid in processes_in(job.cwd)]
    if job.job.process.returncode != 0 or last_bits(job.cwd)[0] != reference[0]:
        assert run_undisturbed(job.case, job.cwd) == 0
    outcome.bits = last_bits(job.cwd) == reference
    assert outcome.bits


@pytest.mark.parametrize("case", each([*RANKS, *TORCHRUN, *STORES, *SERVERS, *LOADERS]))
def test_the_run_restarts(case, tmp_path, undisturbed):
    """A line names the process, and the bits equal those of the undisturbed run.

    A fault that does not harm the ranks may go unnoticed, such as a store that is killed at the
    exit.
    """
    reference = undisturbed(case)
    with held(case, tmp_path) as (job, outcome):
        before = set(job.job.workers())
        sent_at = job.inject(signal.Signals[f"SIG{case.signal}"])
        job.resume()

        def is_noticed() -> bool:
            if job.has_restarted(before):
                outcome.ended = "restart"
            elif (code := job.job.process.poll()) is not None:
                outcome.ended = f"exit {code}"
            return outcome.ended != "hangs"

        assert in_time(is_noticed, PATIENCE_S), job.job.text()
        outcome.seconds = round(time.monotonic() - sent_at, 1)
        job.explain(outcome)
        assert job.wait() == 0, job.job.text()
        if case.process.startswith("rank") or outcome.ended == "restart":
            assert outcome.ended == "restart"
            assert re.search(case.expectation, outcome.line), job.job.text()
        check_end(job, outcome, reference)


@pytest.mark.parametrize("case", each(LAUNCHERS))
def test_nothing_outlives_the_launcher(case, tmp_path, undisturbed):
    """The same command then completes the run."""
    reference = undisturbed(case)
    with held(case, tmp_path) as (job, outcome):
        sent_at = job.inject(signal.SIGKILL)
        job.resume()
        check_gone(job, outcome, sent_at)
        check_end(job, outcome, reference)


def check_gone(job: HeldJob, outcome: Outcome, since: float) -> None:
    """Check that all processes of the run end."""
    is_over = in_time(job.is_over, PATIENCE_S)
    job.explain(outcome)
    assert is_over, [describe(pid) for pid in processes_in(job.cwd)]
    outcome.seconds = round(time.monotonic() - since, 1)
    outcome.ended = "gone"


@pytest.mark.parametrize("case", each(TERMINATED))
def test_sigterm_while_a_process_is_stopped(case, tmp_path, undisturbed):
    """Processes that are alive after the grace period are killed."""
    reference = undisturbed(case)
    with held(case, tmp_path) as (job, outcome):
        job.inject(signal.SIGSTOP)
        job.resume()
        sent_at = time.monotonic()
        job.job.process.send_signal(signal.SIGTERM)
        check_gone(job, outcome, sent_at)
        check_exit_code(job, signal.SIGTERM)
        check_end(job, outcome, reference)


def check_exit_code(job: HeldJob, number: signal.Signals) -> None:
    """Check that the exit code is the one after a signal, or 0 if there was nothing left to do."""
    code = job.job.process.returncode
    if job.case.stage == "imports" and code == -number:  # the launcher had no handler yet
        return
    is_stopped_rank = job.case.process.startswith("rank")
    may_complete = job.case.stage in STAGES_AFTER_RESULT or not is_stopped_rank
    assert code == 128 + number or (may_complete and code == 0), job.job.text()


@pytest.mark.parametrize("case", each(INTERRUPTED))
def test_the_second_ctrl_c_ends_everything(case, tmp_path, undisturbed):
    """The ranks need not reach any other point: they stay where they are held."""
    reference = undisturbed(case)
    with held(case, tmp_path) as (job, outcome):
        if case.process != "none":
            job.inject(signal.SIGSTOP)
        os.killpg(job.job.process.pid, signal.SIGINT)
        time.sleep(CTRL_C_INTERVAL_S)
        sent_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # the first Ctrl-C may have been enough
            os.killpg(job.job.process.pid, signal.SIGINT)
        check_gone(job, outcome, sent_at)
        assert "Traceback" not in job.job.text()
        check_exit_code(job, signal.SIGINT)
        check_end(job, outcome, reference)
