"""Check that all ranks name a hanging rank and its activity before their collectives time out."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from holding import SCORES, SETTINGS, STEPS, HeldRun, pause_at, with_scores, worker
from launching import committed, is_running, python_main, torchrun, wait_for, with_code
from runs import train, weights

# Without background saves, step 8 is committed before step 9 is taken.
SAVES = [*SETTINGS, "snapshot.every_steps=4", "snapshot.background=false"]
# Rank <rank> sleeps before step 10. If <again> is True, it does so in every attempt, otherwise only
# in the first.
SLEEP = """
def reach(step, rank):
    if step == 10 and rank == <rank> and (<again> or not (HERE / "slept").exists()):
        touch("slept")
        sleep_for_ever()
"""
STALLED = r"error: rank {} has stalled for \d+ s while in a hook of @acts\('update'\), .*"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function that trains an uninterrupted run on a number of ranks.

    It returns the weights.
    """

    def get(ranks: int) -> bytes:
        root = tmp_path_factory.mktemp("uninterrupted")
        return weights(train(root, *SAVES, f"ddp.nproc_per_node={ranks}"))

    return get


def start(ranks: int, restarts: int, cwd: Path, reach: str) -> HeldRun:
    limits = ["ddp.timeout_s=6", f"ddp.max_restarts={restarts}"]
    command = [*python_main(), *SAVES, f"ddp.nproc_per_node={ranks}", *limits]
    return HeldRun(command, cwd, reach)


def sleep(rank: int, again: bool) -> str:
    return SLEEP.replace("<rank>", str(rank)).replace("<again>", str(again))


def check_first_error(run: Path, rank: int, reason: str) -> None:
    """Check that a rank's first error is `reason`, and not a collective that has timed out."""
    text = (run / f"main.rank{rank}.log").read_text()
    errors = re.findall(r"^\S+ \S+ ERROR (error: .*)$", text, re.M)
    assert errors, f"rank {rank} reported no error"
    assert re.fullmatch(reason, errors[0]), errors


def test_every_rank_names_a_stalled_rank_and_the_run_resumes(tmp_path, uninterrupted):
    run = tmp_path / "outputs" / "run"
    held = start(3, 1, tmp_path, sleep(rank=1, again=False))
    assert held.wait() == 0, held.job.text()
    text = held.job.text()
    for rank in range(3):
        check_first_error(run, rank, STALLED.format(1))
    assert re.search(STALLED.format(1), text)
    assert "sleep_for_ever" in (run / "main.rank1.log").read_text(), "the stack of the rank"
    for other in (text, (run / "main.rank0.log").read_text(), (run / "main.rank2.log").read_text()):
        assert "sleep_for_ever" not in other
    assert "restart 1 of 1" in text
    assert "resuming from the snapshot of step 8" in text
    assert weights(run) == uninterrupted(3)


def test_without_restarts_the_last_line_names_the_root_cause(tmp_path):
    held = start(2, 0, tmp_path, sleep(rank=0, again=True))
    assert held.wait() == 1
    lines = held.job.text().strip().splitlines()
    assert re.search(STALLED.format(0), lines[-1]), lines[-5:]
    assert "lost" not in held.job.text()
    assert committed(tmp_path / "outputs" / "run")[-1] == 8


def test_a_stopped_worker_is_killed_and_the_run_resumes(tmp_path, uninterrupted):
    run = tmp_path / "outputs" / "run"
    held = start(2, 1, tmp_path, pause_at(10))
    held.wait_until("step10", 0, 1)
    stopped = worker(held.job, 1)
    os.kill(stopped, signal.SIGSTOP)
    held.resume()
    wait_for(lambda: not is_running(stopped), what="the end of the stopped worker")
    reason = r"error: rank 1 has stalled for \d+ s while .+; its process does not respond"
    assert held.wait() == 0, held.job.text()
    check_first_error(run, 0, reason)
    assert re.search(reason, held.job.text())
    assert "restart 1 of 1" in held.job.text()
    assert committed(run)[-1] == STEPS
    assert weights(run) == uninterrupted(2)


# Rank 1 fails in step 10, once over all attempts. Meanwhile rank 0 is blocked outside of Python, so
# that the SIGTERM handler cannot run, as in a CUDA call that waits for the failed rank.
BLOCKED = """
def block():
    lock = ctypes.CDLL(None).pthread_mutex_lock  # no signal interrupts it
    mutex = ctypes.create_string_buffer(256)
    lock(mutex)
    touch("blocked")
    lock(mutex)

def forward_begins(step, training):
    if step == 10 and training and not (HERE / "failed").exists():
        if rank() == 0:
            block()
        while not ((HERE / "blocked").exists() and <when>.exists()):
            time.sleep(0.01)
        touch("failed")
        raise RuntimeError("broken")
"""
# The snapshot of step 8 is committed some seconds after the failure.
SLOW_COMMIT = """
import time
from pathlib import Path
from mingpt_ddp.snapshots.write.store import SnapshotStore

HERE = Path(__file__).parent
commit = SnapshotStore.commit

def slowly(self, step, *arguments, **named):
    if step == 8 and not (HERE / "committing").exists():
        (HERE / "committing").touch()
        while not [*HERE.parent.glob("site-*/failed")]:
            time.sleep(0.01)
        time.sleep(6)
    return commit(self, step, *arguments, **named)

SnapshotStore.commit = slowly
"""
BACKGROUND = [*SETTINGS, "snapshot.every_steps=4"]
LAUNCHERS = {
    "nproc_per_node": [*python_main(), "ddp.nproc_per_node=2", "ddp.max_restarts=1"],
    "torchrun": torchrun(2, "--max-restarts=1"),
}


def start_blocked(launcher: str, cwd: Path, when: str, **extra: str) -> HeldRun:
    command = [*LAUNCHERS[launcher], *with_scores(BACKGROUND, cwd)]
    return HeldRun(command, cwd, SCORES + BLOCKED.replace("<when>", when), group="model", **extra)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_blocked_outside_of_python_leaves_after_a_failure(tmp_path, launcher):
    """Otherwise its launcher would kill it 30 s later."""
    run = tmp_path / "outputs" / "run"
    held = start_blocked(launcher, tmp_path, '(HERE / "blocked")')
    assert held.wait() == 0, held.job.text()
    log = (run / "main.rank0.log").read_text()
    assert "rank 0 is blocked here after another rank failed" in log
    assert "pthread" not in held.job.text(), "the stack belongs into the file"
    assert re.search(r"ERROR error: rank 1: RuntimeError: broken", log)
    assert log.count("RuntimeError: broken") == 1
    words = [*with_scores(BACKGROUND, tmp_path), f"model.code={held.site}/hold.py"]
    undisturbed = train(tmp_path / "undisturbed", *words, "ddp.nproc_per_node=2")
    assert weights(run) == weights(undisturbed)


def test_a_blocked_rank_first_commits_its_snapshot(tmp_path):
    run, site = tmp_path / "outputs" / "run", tmp_path / "slow"
    path = with_code(site, SLOW_COMMIT)
    held = start_blocked("nproc_per_node", tmp_path, f'Path("{site}/committing")', PYTHONPATH=path)
    assert held.wait() == 0, held.job.text()
    assert "resuming from the snapshot of step 8" in held.job.text()
    assert "rank 0 is blocked here" in (run / "main.rank0.log").read_text()


# Rank 1 hangs before its update in step 9. Rank 0 has waited for its data for even longer.
HANG = """
@acts("gradients")
def late(step, gradients):
    if step == 9 and rank() == 1:
        time.sleep(1)

@acts("gradients")
def hang(step, gradients):
    if step == 9 and rank() == 1:
        sleep_for_ever()

def reach(step, rank):
    pass
"""


@pytest.mark.parametrize("options", [["ddp.strategy=zero1"], ["optimizer=muon", "model.n_embd=96"]])
def test_a_rank_that_hangs_in_its_update_is_named(tmp_path, options):
    command = [*python_main(), "ddp.nproc_per_node=2", "ddp.max_restarts=0", "ddp.timeout_s=6"]
    held = HeldRun([*command, *BACKGROUND, *options], tmp_path, HANG)
    assert held.wait() == 1
    reason = STALLED.format(1).replace("update", "gradients")
    assert re.search(reason, held.job.text()), held.job.text()
