"""A rank that hangs is named on all ranks, with what it was doing, before the collectives of the
others time out.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from launching import committed, is_running, python_main, torchrun, wait_for
from multiprocess.ranks import configure, run_ranks
from pause_points import SETTINGS, STEPS, PausedJob, patches, train, weights, worker

TIMEOUT_S = 6
OPTIONS = ["snapshot.every_steps=4", f"ddp.timeout_s={TIMEOUT_S}"]

# Rank <rank> sleeps in its data loader before step 9; <again>: at every attempt, not just the
# first.
SLEEP = """
def patch(loader):
    original = loader.TokenLoader.get_batch
    warming_up = [True]
    def sleep_for_ever():
        while True:
            time.sleep(1)
    def get_batch(self, step, plan, rank):
        if step == 9 and rank == <rank> and not warming_up[0] and (<again> or not (HERE / "slept").exists()):
            touch("slept")
            sleep_for_ever()
        warming_up[0] = False
        return original(self, step, plan, rank)
    loader.TokenLoader.get_batch = get_batch
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""  # noqa: E501
PAUSE = """
def patch(loader):
    original = loader.TokenLoader.get_batch
    warming_up = [True]
    def get_batch(self, step, plan, rank):
        if step == 9 and not warming_up[0]:
            pause("step9")
        warming_up[0] = False
        return original(self, step, plan, rank)
    loader.TokenLoader.get_batch = get_batch
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the weights of the uninterrupted run, by number of ranks."""

    def get(ranks: int) -> bytes:
        root = tmp_path_factory.mktemp("uninterrupted")
        run_ranks(
            ranks,
            train,
            root / "ranks",
            values=configure(*SETTINGS, *OPTIONS[:1], f"run.root={root}"),
        )
        return weights(root / "run")

    return get


def start(ranks: int, restarts: int, cwd: Path, text: str) -> PausedJob:
    return PausedJob(
        python_main(),
        cwd,
        text,
        *OPTIONS,
        "snapshot.background=false",  # step 8 is committed when step 9 begins
        f"ddp.nproc_per_node={ranks}",
        f"ddp.max_restarts={restarts}",
    )


def check_first_error(run: Path, rank: int, reason: str) -> None:
    """Check that a rank's first error is `reason`, and not that its collective has timed out."""
    text = (run / f"main.rank{rank}.log").read_text()
    errors = re.findall(r"^\S+ \S+ ERROR (error: .*)$", text, re.M)
    assert errors, f"rank {rank} reported no error"
    assert re.fullmatch(reason, errors[0]), errors


def test_every_rank_names_a_stalled_rank_and_the_run_resumes(tmp_path, uninterrupted):
    run = tmp_path / "outputs" / "run"
    paused = start(3, 1, tmp_path, patches(SLEEP, rank=1, again=False))
    assert paused.wait() == 0, paused.job.text()
    text = paused.job.text()
    reason = r"error: rank 1 has stalled for \d+ s while fetching the batch of step 9"
    for rank in range(3):
        check_first_error(run, rank, reason)
    assert re.search(reason, text)
    assert "sleep_for_ever" in (run / "main.rank1.log").read_text(), (
        "the stack of the rank is missing"
    )
    for other in (text, (run / "main.rank0.log").read_text(), (run / "main.rank2.log").read_text()):
        assert "sleep_for_ever" not in other
    assert "restart 1 of 1" in text
    assert "resuming from the snapshot of step 8" in text
    assert weights(run) == uninterrupted(3)


def test_without_restarts_the_last_line_names_the_root_cause(tmp_path):
    paused = start(2, 0, tmp_path, patches(SLEEP, rank=0, again=True))
    assert paused.wait() == 1
    lines = paused.job.text().strip().splitlines()
    assert re.search(
        r"error: rank 0 has stalled for \d+ s while fetching the batch of step 9", lines[-1]
    ), lines[-5:]
    assert "lost" not in paused.job.text()
    assert committed(tmp_path / "outputs" / "run")[-1] == 8


def test_a_stopped_worker_is_killed_and_the_run_resumes(tmp_path, uninterrupted):
    run = tmp_path / "outputs" / "run"
    paused = start(2, 1, tmp_path, patches(PAUSE))
    paused.wait_until("step9", 0, 1)
    wait_for(lambda: committed(run)[-1:] == [8], what="the snapshot")
    stopped = worker(paused.job, 1)
    os.kill(stopped, signal.SIGSTOP)
    paused.resume()
    wait_for(lambda: not is_running(stopped), what="the end of the stopped worker")
    reason = r"error: rank 1 has stalled for \d+ s while .+; its process does not respond"
    assert paused.wait() == 0, paused.job.text()
    check_first_error(run, 0, reason)
    assert re.search(reason, paused.job.text())
    assert "restart 1 of 1" in paused.job.text()
    assert committed(run)[-1] == STEPS
    assert weights(run) == uninterrupted(2)


# Rank 1 fails in step 9, once over all attempts, while rank 0 is where the handler of SIGTERM,
# which is Python, cannot run: as in a CUDA call, which waits for the failed rank.
BLOCKED = """
import ctypes

def block():
    lock = ctypes.CDLL(None).pthread_mutex_lock  # no signal interrupts it
    mutex = ctypes.create_string_buffer(256)
    lock(mutex)
    touch("blocked")
    lock(mutex)

def patch(loader):
    original = loader.TokenLoader.get_batch
    warming_up = [True]
    def get_batch(self, step, plan, rank):
        if step == 9 and not warming_up[0] and not (HERE / "failed").exists():
            if rank == 0:
                block()
            while not (HERE / "<after>").exists():
                time.sleep(0.01)
            touch("failed")
            raise RuntimeError("broken")
        warming_up[0] = False
        return original(self, step, plan, rank)
    loader.TokenLoader.get_batch = get_batch
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""
# The snapshot of step 8 is committed seconds after the failure.
SLOW_COMMIT = """
def patch_store(store):
    original = store.SnapshotStore.commit
    def commit(self, step, *arguments, **named):
        if step == 8 and not (HERE / "failed").exists():
            touch("committing")
            while not (HERE / "failed").exists():
                time.sleep(0.01)
            time.sleep(6)
        return original(self, step, *arguments, **named)
    store.SnapshotStore.commit = commit
PATCHES["mingpt_ddp.snapshots.store"] = patch_store
"""
LAUNCHERS = {
    "nproc_per_node": [*python_main(), "ddp.nproc_per_node=2", "ddp.max_restarts=1"],
    "torchrun": torchrun(2, "--max-restarts=1"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_blocked_outside_of_python_leaves_after_a_failure(tmp_path, launcher, uninterrupted):
    """Its launcher would kill it 30 s later."""
    run = tmp_path / "outputs" / "run"
    text = patches(BLOCKED, after="blocked")
    paused = PausedJob(LAUNCHERS[launcher], tmp_path, text, "snapshot.every_steps=4")
    assert paused.wait() == 0, paused.job.text()
    log = (run / "main.rank0.log").read_text()
    assert "rank 0 is blocked here after another rank failed" in log
    assert "pthread" not in paused.job.text(), "the stack belongs into the file"
    assert re.search(r"ERROR error: rank 1: RuntimeError: broken", log)
    assert log.count("RuntimeError: broken") == 1
    assert weights(run) == uninterrupted(2)


def test_a_blocked_rank_first_commits_its_snapshot(tmp_path):
    run = tmp_path / "outputs" / "run"
    text = patches(BLOCKED + SLOW_COMMIT, after="committing")
    command = LAUNCHERS["nproc_per_node"]
    paused = PausedJob(command, tmp_path, text, "snapshot.every_steps=4")
    assert paused.wait() == 0, paused.job.text()
    assert "resuming from the snapshot of step 8" in paused.job.text()
    assert "rank 0 is blocked here" in (run / "main.rank0.log").read_text()


# Rank 1 hangs in its update of step 9, while rank 0 waits for what it sends, and has for longer.
SLEEP_IN_UPDATE = """
def patch(anomaly):
    original = anomaly.AnomalyPolicy.find_in_step
    steps = []
    def find_in_step(self, loss, grad_norm):
        steps.append(loss)
        group = self.run.runtime.group
        if len(steps) == 9 and group.rank == 1:
            time.sleep(1)
            group.set_activity(group.heartbeat["activity"])
            while True:
                time.sleep(1)
        return original(self, loss, grad_norm)
    anomaly.AnomalyPolicy.find_in_step = find_in_step
PATCHES["mingpt_ddp.training.anomaly"] = patch
"""


@pytest.mark.parametrize("options", [["ddp.strategy=zero1"], ["optimizer=muon", "model.n_embd=96"]])
def test_a_rank_that_hangs_in_its_update_is_named(tmp_path, options):
    command = [*python_main(), "ddp.nproc_per_node=2", "ddp.max_restarts=0"]
    paused = PausedJob(command, tmp_path, patches(SLEEP_IN_UPDATE), *OPTIONS, *options)
    assert paused.wait() == 1
    reason = r"error: rank 1 has stalled for \d+ s while in the backward pass of step 9"
    assert re.search(reason, paused.job.text()), paused.job.text()
