"""A rank that stands still is named, on all ranks and with what it was doing, before the others give up waiting."""

from __future__ import annotations

import os
import re
import signal
from datetime import datetime
from pathlib import Path

import pytest
from launching import committed, is_running, python_main, wait_for
from multiprocess.ranks import configure, run_ranks
from pause_points import SETTINGS, STEPS, Held, patches, train, weights, worker

TIMEOUT_S = 6
OPTIONS = ["snapshot.every_steps=4", f"ddp.timeout_s={TIMEOUT_S}"]

# Rank <rank> sleeps in its data loader before step 9; <again> says whether it does so at every attempt.
SLEEP = """
def patch(loader):
    step_of = loader.TokenLoader.get_batch
    settling = [True]
    def sleep_for_ever():
        while True:
            time.sleep(1)
    def step(self, number, plan, rank):
        if number == 9 and rank == <rank> and not settling[0] and (<again> or not (HERE / "slept").exists()):
            touch("slept")
            sleep_for_ever()
        settling[0] = False
        return step_of(self, number, plan, rank)
    loader.TokenLoader.get_batch = step
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""
HOLD = """
def patch(loader):
    step_of = loader.TokenLoader.get_batch
    settling = [True]
    def step(self, number, plan, rank):
        if number == 9 and not settling[0]:
            hold("step9")
        settling[0] = False
        return step_of(self, number, plan, rank)
    loader.TokenLoader.get_batch = step
PATCHES["mingpt_ddp.data.dataloader"] = patch
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the run that nobody disturbed, by number of ranks."""

    def get(ranks: int) -> bytes:
        root = tmp_path_factory.mktemp("undisturbed")
        run_ranks(ranks, train, root / "ranks", values=configure(*SETTINGS, *OPTIONS[:1], f"run.root={root}"))
        return weights(root / "run")

    return get


def start(ranks: int, restarts: int, cwd: Path, text: str) -> Held:
    return Held(python_main(), cwd, text, *OPTIONS, f"ddp.nproc_per_node={ranks}", f"ddp.max_restarts={restarts}")


def told(run: Path, rank: int, reason: str) -> datetime:
    """When a rank's log says so; what it says first."""
    lines = re.findall(r"^(\S+ \S+) ERROR (error: .*)$", (run / f"main.rank{rank}.log").read_text(), re.M)
    assert lines, f"rank {rank} says nothing"
    assert re.fullmatch(reason, lines[0][1]), lines
    return datetime.strptime(lines[0][0], "%Y-%m-%d %H:%M:%S,%f")


def test_a_rank_that_sleeps_is_named_by_all_and_the_run_goes_on(tmp_path, undisturbed):
    run = tmp_path / "outputs" / "run"
    held = start(3, 1, tmp_path, patches(SLEEP, rank=1, again=False))
    assert held.end(90) == 0, held.job.text()
    text = held.job.text()
    reason = r"error: rank 1 has stalled for [4-7] s while fetching the batch of step 9"
    asleep = datetime.fromtimestamp((held.site / "slept").stat().st_mtime)
    for rank in range(3):
        assert (told(run, rank, reason) - asleep).total_seconds() < TIMEOUT_S + 1
    assert re.search(reason, text)
    assert "sleep_for_ever" in (run / "main.rank1.log").read_text(), "its stack is missing"
    for other in (text, (run / "main.rank0.log").read_text(), (run / "main.rank2.log").read_text()):
        assert "sleep_for_ever" not in other
    assert "restart 1 of 1" in text
    assert "resuming from the snapshot of step 8" in text
    assert weights(run) == undisturbed(3)


def test_without_restarts_the_last_line_names_the_culprit(tmp_path):
    held = start(2, 0, tmp_path, patches(SLEEP, rank=0, again=True))
    assert held.end(60) == 1
    lines = held.job.text().strip().splitlines()
    assert re.search(r"error: rank 0 has stalled for [4-7] s while fetching the batch of step 9", lines[-1]), lines[-5:]
    assert "lost" not in held.job.text()
    assert committed(tmp_path / "outputs" / "run")[-1] == 8


def test_a_stopped_worker_is_ended_and_the_run_goes_on(tmp_path, undisturbed):
    run = tmp_path / "outputs" / "run"
    held = start(2, 1, tmp_path, patches(HOLD))
    held.wait_until("step9", 0, 1)
    wait_for(lambda: committed(run)[-1:] == [8], what="the snapshot")
    stopped = worker(held.job, 1)
    os.kill(stopped, signal.SIGSTOP)
    held.go()
    begin = datetime.now()
    wait_for(lambda: not is_running(stopped), timeout=30, what="the end of the stopped worker")
    # What it told last, up to half a second before.
    reason = r"error: rank 1 has stalled for [4-7] s while .+; its process does not respond"
    assert held.end(60) == 0, held.job.text()
    assert (told(run, 0, reason) - begin).total_seconds() < TIMEOUT_S + 1
    assert re.search(reason, held.job.text())
    assert "restart 1 of 1" in held.job.text()
    assert committed(run)[-1] == STEPS
    assert weights(run) == undisturbed(2)
