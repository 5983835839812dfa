"""What attempts have lost, and how many died: by the train state and `attempt.json`."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace

import pytest

from mingpt_ddp.distributed.env import DistEnv, launcher_id
from mingpt_ddp.metrics.jsonl import METRICS
from mingpt_ddp.storage.run_directory import Attempt, RunDirectory
from mingpt_ddp.training.saves.attempts import count_attempt, record_attempt
from mingpt_ddp.training.train_state import TrainState

ALONE = DistEnv()
WORKER = DistEnv(has_agent=True)
STARTUP_S = 2.0
NOW = 10_000.0  # since 1970, when the attempt begins to train
DIED = Attempt(began=9_000.0, wasted_seconds=7.0, failures=3, has_died=True, ended=9_040.0)


@pytest.fixture(autouse=True)
def clocks(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)


def counted(state: TrainState, last: Attempt, env: DistEnv = ALONE) -> float:
    return count_attempt(state, last, 500.0 - STARTUP_S, env)


def test_a_first_attempt_wastes_its_start():
    state = TrainState()
    assert counted(state, Attempt()) == math.inf
    assert state == TrainState(wasted_seconds=STARTUP_S)


def test_killed_before_its_first_snapshot():
    """It trained for 40 s, after what the run had wasted before it."""
    state = TrainState()
    assert counted(state, DIED) == 10.0
    assert state == TrainState(wasted_seconds=7 + 40 + STARTUP_S, failures=4)


def test_killed_after_a_snapshot_of_its_own():
    """Only the work after it is lost; the snapshot has all that was wasted before."""
    state = TrainState(saved_at=9_030.0, wasted_seconds=7.0, failures=3)
    assert counted(state, DIED) == math.inf
    assert (state.wasted_seconds, state.failures) == (7 + 10 + STARTUP_S, 4)


def test_the_pause_since_an_older_snapshot_is_no_waste():
    """The attempt before the last one saved it, and the run was off until the last one."""
    state = TrainState(saved_at=1_000.0, wasted_seconds=5.0, failures=1)
    assert counted(state, DIED) == 10.0
    assert (state.wasted_seconds, state.failures) == (7 + 40 + STARTUP_S, 4)


def test_under_the_same_launcher_all_the_time_counts():
    last = replace(DIED, launcher=launcher_id(WORKER), began=9_900.0)
    state = TrainState()
    assert counted(state, last, WORKER) == (100 - STARTUP_S) / 4
    assert state.wasted_seconds == 7 + 100
    state = TrainState()
    counted(state, replace(last, launcher="another"), WORKER)
    assert state.wasted_seconds == 7 + STARTUP_S  # its last line is older than its begin


@pytest.mark.parametrize("saved_at", [0.0, 9_030.0])
def test_a_preempted_attempt_has_not_failed(saved_at):
    state = TrainState(step=5, saved_at=saved_at)
    ended = replace(DIED, has_died=False, ended=9_999.0, result_step=5)
    assert counted(state, ended) == math.inf
    assert state.failures == 0
    assert state.wasted_seconds == (0 if saved_at else 7) + STARTUP_S  # no pause since then


def test_preempted_without_time_for_a_snapshot():
    """It has not failed, but what it trained since the last snapshot is lost."""
    state = TrainState(step=5, saved_at=9_030.0, wasted_seconds=7.0, failures=3)
    assert counted(state, replace(DIED, has_died=False, result_step=8)) == math.inf
    assert (state.wasted_seconds, state.failures) == (7 + 10 + STARTUP_S, 3)


def test_killed_before_its_first_metrics():
    """Its time is counted up to their last line, which is that of the attempt before."""
    state = TrainState()
    assert counted(state, replace(DIED, ended=DIED.began - 1.0)) == 0.0
    assert state == TrainState(wasted_seconds=7 + STARTUP_S, failures=4)


def test_nothing_is_counted_of_an_unknown_attempt():
    """That of an earlier version; or there is none, and the snapshot is of another run."""
    state = TrainState(saved_at=9_000.0)
    assert counted(state, Attempt(ended=9_040.0)) == math.inf
    assert (state.wasted_seconds, state.failures) == (STARTUP_S, 0)


def test_the_record_in_the_run_directory(tmp_path):
    owner = RunDirectory(tmp_path / "run")
    assert owner.last_attempt(METRICS) == Attempt()
    record_attempt(owner, TrainState(wasted_seconds=5.0, failures=2), ALONE)
    (owner.path / METRICS).write_text("a line")
    os.utime(owner.path / METRICS, (9_040.0, 9_040.0))
    expected = Attempt(NOW, 5.0, 2, "", has_died=True, ended=9_040.0)
    assert owner.last_attempt(METRICS) == expected
    (owner.path / "result.json").write_text('{"step": 8}')
    assert owner.last_attempt(METRICS) == replace(expected, has_died=False, result_step=8)
    for damaged in ("", "[]", "{}"):
        (owner.path / "result.json").write_text(damaged)
        assert owner.last_attempt(METRICS) == replace(expected, has_died=False)
    owner.release()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 9999,
        json.dumps({"began": "x", "wasted_seconds": 0, "failures": 0, "launcher": ""}),
        json.dumps({"began": 1, "wasted_seconds": math.inf, "failures": math.inf, "launcher": ""}),
    ],
)
def test_a_damaged_record_is_ignored(content, tmp_path):
    owner = RunDirectory(tmp_path / "run")
    (owner.path / "attempt.json").write_text(content)
    assert owner.last_attempt(METRICS) == Attempt()
    owner.release()


def test_a_launcher_is_the_parent_that_restarts_this_process():
    assert launcher_id(ALONE) == ""
    assert launcher_id(WORKER).split("/")[1] == str(os.getppid())
    assert launcher_id(WORKER) == launcher_id(WORKER)
