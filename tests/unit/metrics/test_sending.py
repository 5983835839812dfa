"""Each step is sent to a tracker exactly once, after a snapshot contains it.

This holds after kills and rollbacks, and if the tracker's server does not respond for a while.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import wait_for
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.jsonl import METRICS, JSONLLogger
from mingpt_ddp.metrics.trackers.sending import TRACKERS, Sender, check_installed
from mingpt_ddp.metrics.trackers.tracker import Tracker

Point = tuple[int, dict[str, float]]


class Server:
    """The data that a tracker has stored. Like a real one, it cannot delete points."""

    def __init__(self, points: Sequence[Point] = ()) -> None:
        self.points = [*points]
        self.results: list[dict[str, Any]] = []
        self.connections = 0
        self.fails_after: float = float("inf")  # number of steps that a connection accepts
        self.answers = threading.Event()
        self.answers.set()

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]


class FakeTracker(Tracker):
    name = "fake"

    def __init__(self, server: Server) -> None:
        self.server = server

    def start(self) -> int:
        self.server.answers.wait()
        self.server.connections += 1
        self.taken = 0
        return max(self.server.steps, default=0) + 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.server.answers.wait()
        if self.taken >= self.server.fails_after:
            raise ConnectionError("https://me:secret@host/api is away")
        self.server.points.append((step, metrics))
        self.taken += 1

    def finish(self, result: dict[str, Any]) -> None:
        self.server.results.append(result)


class Attempt:
    """One attempt of a run. It begins after `step`, and counts as killed if it never ends."""

    def __init__(self, directory: Path, server: Server, step: int = 0) -> None:
        self.server = server
        self.history = JSONLLogger(directory / METRICS)
        self.history.start(step, 1)
        self.sender = Sender(FakeTracker(server), directory / METRICS)

    def train(self, *steps: int, loss: float = 2.0) -> Attempt:
        for step in steps:
            self.history.log(step, {"train/loss": loss + step, "train/unseen": float("nan")})
            if step % 4 == 0:
                self.history.log(step, {"val/loss": loss - step})
        return self

    def save(self, step: int) -> Attempt:
        """Commit a snapshot, and wait until the server has all steps before it."""
        self.sender.commit(step)
        wait_for(lambda: self.server.steps[-1:] == [step - 1])
        return self

    def end(self, step: int) -> None:
        self.sender.finish({"step": step})
        self.sender.join()


def points(*steps: int, loss: float = 2.0) -> list[Point]:
    return [
        (s, {"train/loss": loss + s} | ({"val/loss": loss - s} if s % 4 == 0 else {}))
        for s in steps
    ]


@pytest.fixture
def server():
    server = Server()
    yield server
    server.answers.set()


def test_a_step_is_sent_once_a_later_snapshot_is_committed(server, tmp_path):
    attempt = Attempt(tmp_path, server).train(*range(1, 8))
    attempt.sender.commit(0)  # step 0 means that there is no snapshot yet
    assert (server.connections, server.points) == (0, []), "a run appears with its first snapshot"
    attempt.save(4)
    assert server.points == points(1, 2, 3), "the evaluation of step 4 could be repeated"
    attempt.train(8).save(8)
    assert server.points == points(*range(1, 8))
    attempt.history.log(8, {"test/loss": 1.0})
    attempt.end(8)
    *before, (step, metrics) = server.points
    assert before == points(*range(1, 8))
    assert (step, metrics) == (8, {"train/loss": 10.0, "val/loss": -6.0, "test/loss": 1.0})
    assert (server.results, server.connections) == ([{"step": 8}], 1)


def test_an_older_snapshot_after_a_newer_one_was_lost(server, tmp_path):
    Attempt(tmp_path, server).train(*range(1, 8)).save(6)
    Attempt(tmp_path, server, step=2).train(*range(3, 9)).end(8)
    assert server.points == points(*range(1, 9))


@pytest.mark.parametrize("sent_before_kill", [0, 1, 3])
def test_a_killed_attempt(sent_before_kill, server, tmp_path):
    """It is killed when the server has `sent_before_kill` of the steps. Step 5 is trained again."""
    server.fails_after = sent_before_kill
    killed = Attempt(tmp_path, server).train(1, 2, 3, 4, 5)
    killed.sender.commit(4)
    wait_for(lambda: server.steps == [1, 2, 3][:sent_before_kill] and server.connections)
    server.answers.clear()  # nothing more arrives from the killed attempt
    server = Server(server.points)
    Attempt(tmp_path, server, step=4).train(5, 6, 7, 8).save(7)
    assert server.points == points(*range(1, 7))
    third = Attempt(tmp_path, server, step=7).train(8)
    third.end(8)
    assert server.points == points(*range(1, 9))


def test_damaged_lines_are_not_sent(server, tmp_path):
    attempt = Attempt(tmp_path, server).train(1, 2)
    lines = [b"7", b"[]", b"[" * 100_000, b'{"train_loss": 1.0}', b'{"start": 1.0}', b"\xff"]
    lines.append(b'{"step": 1, "train_loss": "x"}')
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b"\n".join([*lines, b""]))
    attempt.train(3, 4).end(4)
    assert server.points == points(1, 2, 3, 4)
    assert server.results == [{"step": 4}]


def test_an_evaluation_that_is_repeated_after_a_resume_is_sent_with_its_step(server, tmp_path):
    Attempt(tmp_path, server).history.log(1, {"train/loss": 3.0})
    attempt = Attempt(tmp_path, server, step=1)
    attempt.history.log(1, {"val/loss": 4.0})
    attempt.train(2).end(2)
    assert server.points == [(1, {"train/loss": 3.0, "val/loss": 4.0}), *points(2)]


def test_a_rollback_does_not_withdraw_steps_that_were_sent(server, tmp_path):
    attempt = Attempt(tmp_path, server).train(*range(1, 8)).save(4)
    attempt.history.rollback(4)
    attempt.train(6, 7, loss=1.0)  # step 5 is skipped
    attempt.end(7)
    assert server.points == [*points(1, 2, 3, 4), *points(6, 7, loss=1.0)]


def test_a_server_that_fails_for_a_while(server, tmp_path, log_lines):
    server.fails_after = 0
    attempt = Attempt(tmp_path, server).train(1, 2, 3, 4)
    for step in (2, 4):
        attempt.sender.commit(step)
        wait_for(lambda: server.connections == step / 2)  # noqa: B023
        wait_for(lambda: log_lines)
    (line,) = log_lines
    assert line.startswith(
        "WARNING cannot send to fake, training continues without it: ConnectionError"
    )
    assert "secret" not in line
    server.fails_after = float("inf")
    attempt.train(5, 6).save(6)
    assert server.points == points(1, 2, 3, 4, 5)
    attempt.end(6)
    assert server.points == points(*range(1, 7))
    assert len(log_lines) == 1


def test_a_server_that_does_not_respond_for_a_while(server, tmp_path):
    attempt = Attempt(tmp_path, server).train(1, 2).save(2)
    server.answers.clear()
    for step in range(3, 40):
        attempt.train(step).sender.commit(step)  # does not block
    server.answers.set()
    attempt.end(39)
    assert server.points == points(*range(1, 40))
    assert server.connections == 1


def test_the_same_command_sends_the_rest_if_the_server_failed_at_the_end(
    server, tmp_path, log_lines
):
    server.fails_after = 2
    Attempt(tmp_path, server).train(1, 2, 3, 5, 6).end(6)
    last = "WARNING fake lacks the last steps; run the same command again to send them"
    assert log_lines[-1] == last
    server.fails_after = float("inf")
    Attempt(tmp_path, server, step=6).end(6)
    assert server.points == points(1, 2, 3, 5, 6)
    assert server.results == [{"step": 6}]
    assert log_lines.count(last) == 1


@pytest.mark.parametrize("missing", TRACKERS)
def test_a_missing_tracker_library_is_refused(missing, monkeypatch):
    config = from_mapping(configure("tracker=[tensorboard,mlflow,wandb]"))
    find = lambda name: None if name == missing else object()  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find)
    if missing == "trackio":
        check_installed(config.tracker)
    else:
        line = rf"tracker={missing} is not installed; run pip install 'mingpt_ddp\[{missing}\]'"
        with pytest.raises(ConfigError, match=line):
            check_installed(config.tracker)
