"""When points are sent to a tracker, and that each is sent once: kills, rollbacks, a tracker that
is away or hangs.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from mingpt_ddp.metrics.jsonl import METRICS, JSONLLogger
from mingpt_ddp.metrics.trackers import outbox as outbox_module
from mingpt_ddp.metrics.trackers.outbox import Outbox, Points


class Store:
    """What a tracker has stored: it cannot take anything back."""

    def __init__(self) -> None:
        self.points: Points = []
        self.results: list[dict[str, Any]] = []
        self.connections = 0
        self.fails_after: float = float("inf")  # points of an attempt that it takes
        self.seconds = 0.0  # for each call of `send`
        self.answers = threading.Event()
        self.answers.set()

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


class FakeTracker:
    name, is_remote = "fake", True

    def __init__(self, store: Store) -> None:
        self.store = store

    def find_run(self) -> int:
        self.store.answers.wait()
        self.store.connections += 1
        self.taken = 0
        return max(self.store.steps, default=0) + 1

    def send(self, points: Points) -> None:
        time.sleep(self.store.seconds)
        for point in points:
            if self.taken >= self.store.fails_after:
                raise ConnectionError("https://me:secret@host/api is away")
            self.store.points.append(point)
            self.taken += 1

    def finish(self, result: dict[str, Any]) -> None:
        self.store.results.append(result)


class Attempt:
    """One attempt of a run that begins after `step`."""

    def __init__(self, directory: Path, store: Store, step: int = 0) -> None:
        self.outbox = Outbox(FakeTracker(store), directory, "id")
        self.history = JSONLLogger(directory / METRICS)
        self.history.start(step, 1)

    def train(self, *steps: int, loss: float = 2.0) -> Attempt:
        for step in steps:
            self.history.log(step, {"train/loss": loss + step})
            if step % 4 == 0:
                self.history.log(step, {"val/loss": loss - step})
        return self

    def save(self, step: int) -> Attempt:
        """Make a snapshot durable, and wait until the outbox has done what it can."""
        self.outbox.cover(step)
        wait_until(lambda: not self.outbox._thread.is_alive())
        return self

    def end(self, step: int) -> None:
        self.outbox.finish(step, {"step": step})
        self.outbox.join()


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 200
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def points(*steps: int, loss: float = 2.0) -> Points:
    return [
        (s, {"train/loss": loss + s} | ({"val/loss": loss - s} if s % 4 == 0 else {}))
        for s in steps
    ]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setitem(sys.modules, "fake", types.ModuleType("fake"))  # the library
    return Store()


def test_a_step_is_sent_once_a_later_snapshot_is_durable(store, tmp_path):
    attempt = Attempt(tmp_path, store).train(*range(1, 8))
    assert (store.connections, store.points) == (0, []), "the run is created with its first points"
    attempt.save(4)
    assert store.points == points(1, 2, 3), "the evaluation of step 4 could be repeated"
    attempt.train(8).save(8)
    assert store.points == points(*range(1, 8))
    attempt.end(8)
    assert store.points == points(*range(1, 9))
    assert store.results == [{"step": 8}]
    assert store.connections == 1


@pytest.mark.parametrize("sent_before_kill", [0, 1, 3])
def test_a_killed_attempt(sent_before_kill, store, tmp_path):
    """It is killed after `sent_before_kill` points of a snapshot, and step 5 is trained again."""
    store.fails_after = sent_before_kill
    Attempt(tmp_path, store).train(1, 2, 3, 4, 5).save(4)
    assert store.steps == [1, 2, 3][:sent_before_kill]
    store.fails_after = float("inf")
    second = Attempt(tmp_path, store, step=4).train(5).save(4)
    assert store.points == points(1, 2, 3)
    second.train(6, 7, 8).save(7)
    third = Attempt(tmp_path, store, step=7).train(8)
    third.end(8)
    assert store.points == points(*range(1, 9))


def test_a_rollback_takes_no_point_back(store, tmp_path):
    attempt = Attempt(tmp_path, store).train(*range(1, 8)).save(4)
    attempt.history.rollback(4)
    attempt.train(6, 7, loss=1.0)  # step 5 is skipped
    attempt.end(7)
    assert store.points == [*points(1, 2, 3, 4), *points(6, 7, loss=1.0)]


def test_an_older_snapshot_after_a_newer_one_was_lost(store, tmp_path):
    Attempt(tmp_path, store).train(*range(1, 8)).save(6)
    Attempt(tmp_path, store, step=2).train(*range(3, 9)).end(8)
    assert store.points == points(*range(1, 9))


def test_a_tracker_that_is_away_for_a_while(store, tmp_path, log_lines):
    store.fails_after = 0
    attempt = Attempt(tmp_path, store).train(1, 2, 3).save(2).train(4).save(4)
    (line,) = log_lines
    assert line.startswith(
        "WARNING cannot send to fake, training continues without it: ConnectionError"
    )
    assert "secret" not in line
    store.fails_after = float("inf")
    attempt.train(5, 6).save(6)
    assert store.points == points(1, 2, 3, 4, 5)
    attempt.end(6)
    assert store.points == points(*range(1, 7))
    assert len(log_lines) == 1


def test_a_tracker_that_is_away_at_the_end_gets_the_rest_from_the_same_command(
    store, tmp_path, log_lines
):
    store.fails_after = 2
    Attempt(tmp_path, store).train(1, 2, 3).end(3)
    assert (
        log_lines[-1]
        == "WARNING fake lacks the last points; run the same command again to send them"
    )
    store.fails_after = float("inf")
    for _ in range(2):  # the second time there is nothing left
        Attempt(tmp_path, store, step=3).end(3)
    assert store.points == points(1, 2, 3)
    assert store.results == [{"step": 3}]


def test_a_complete_run_that_is_started_again_does_not_connect(store, tmp_path):
    """W&B offline would replace the complete file by one that lacks the last points."""
    Attempt(tmp_path, store).train(1, 2, 3).end(3)
    Attempt(tmp_path, store, step=3).end(3)
    assert (store.connections, store.points) == (1, points(1, 2, 3))
    longer = Attempt(tmp_path, store, step=3).train(4, 5)
    assert store.connections == 1
    longer.end(5)
    assert (store.connections, store.points) == (2, points(1, 2, 3, 4, 5))
    assert store.results == [{"step": 3}, {"step": 5}]


def test_the_end_does_not_wait_for_a_tracker_that_hangs(store, tmp_path, monkeypatch, log_lines):
    monkeypatch.setattr(outbox_module, "REMOTE_S", 0.2)
    store.answers.clear()
    Attempt(tmp_path, store).train(1, 2).end(2)  # returns
    assert log_lines == [
        "WARNING fake lacks the last points; run the same command again to send them"
    ]
    store.answers.set()


def test_the_end_waits_as_long_as_points_arrive(store, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "REMOTE_S", 2.0)
    monkeypatch.setattr(outbox_module, "BATCH", 1)
    store.seconds = 0.4
    Attempt(tmp_path, store).train(*range(1, 8)).end(7)
    assert store.points == points(*range(1, 8))
    assert store.results == [{"step": 7}]


def test_training_does_not_wait_for_a_tracker_that_hangs(store, tmp_path):
    store.answers.clear()
    attempt = Attempt(tmp_path, store).train(1, 2, 3)
    for step in (2, 3):
        attempt.outbox.cover(step)  # returns
    store.answers.set()
    attempt.save(3)
    attempt.end(3)
    assert store.points == points(1, 2, 3)
    assert store.connections == 1


def test_a_run_that_is_trained_again_from_an_older_snapshot_ends_again(store, tmp_path):
    """W&B offline would keep the file of a killed attempt, which lacks the last points."""
    Attempt(tmp_path, store).train(1, 2, 3).end(3)
    Attempt(tmp_path, store, step=2).train(3).save(2)  # and is killed
    Attempt(tmp_path, store, step=3).end(3)
    assert store.points == points(1, 2, 3)
    assert store.results == [{"step": 3}, {"step": 3}]
