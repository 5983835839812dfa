"""A tracker gets the same run id in all attempts, each step once, and the result at the end."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from launching import TINY
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.samples import read_samples
from mingpt_ddp.metrics.trackers.sending import TRACKERS
from mingpt_ddp.metrics.trackers.tracker import Tracker
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.manager import RunState, SnapshotManager
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.training.run import train_run

pytestmark = pytest.mark.usefixtures("one_thread")


class MemoryTracker(Tracker):
    name = "wandb"
    runs: ClassVar[dict[str, dict[int, dict[str, float]]]] = {}
    results: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, config: Any, directory: Path, run_id: str) -> None:
        self.id = run_id

    def start(self) -> int:
        self.points = self.runs.setdefault(self.id, {})
        return max(self.points, default=0) + 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        assert self.points.setdefault(step, metrics) is metrics, f"step {step} was sent twice"

    def finish(self, result: dict[str, Any]) -> None:
        self.results.append(result)


@pytest.fixture(autouse=True)
def tracker(monkeypatch):
    monkeypatch.setitem(TRACKERS, "wandb", MemoryTracker)
    monkeypatch.setattr(MemoryTracker, "runs", {})
    monkeypatch.setattr(MemoryTracker, "results", [])


@functools.cache
def settings() -> str:
    schedule = ["optimizer.schedule_steps=12", "snapshot.keep_best=false", "trainer.sample_every=3"]
    return json.dumps(
        configure(*TINY, *schedule, "trainer.device=cpu", "run.name=run", "tracker=[wandb]")
    )


def train(root: Path, **changes: object) -> None:
    """Train with changed keys. In their names, `__` stands for the dot."""
    values = json.loads(settings())
    for key, value in {"run__root": str(root), **changes}.items():
        group, _, name = key.partition("__")
        values[group][name] = value
    config = from_mapping(values)
    runtime = Runtime(config, DistEnv())
    try:
        train_run(Job(config), runtime)
    finally:
        runtime.close()


def test_attempts_that_fail_are_one_run(tmp_path, monkeypatch):
    save = SnapshotManager.save

    def fail_at(step: int):
        def fail(self: SnapshotManager, run: RunState) -> None:
            if run.step == step:
                raise RuntimeError("killed")
            save(self, run)

        return fail

    for step in (4, 8, 12):  # the first attempt fails before it has a snapshot
        monkeypatch.setattr(SnapshotManager, "save", fail_at(step))
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path)
    monkeypatch.setattr(SnapshotManager, "save", save)
    train(tmp_path)
    (points,) = MemoryTracker.runs.values()
    assert [*points] == [*range(1, 13)]
    assert "val/loss" in points[6] and "val/loss" in points[12] and "val/loss" not in points[5]
    samples = read_samples(tmp_path / "run")
    assert [step for step, _ in samples] == [3, 6, 9, 12]
    (result,) = MemoryTracker.results
    assert (result["status"], result["step"]) == ("complete", 12)
    assert not (tmp_path / "run" / "tensorboard").exists(), "it was not chosen"
    state = SnapshotStore(str(tmp_path / "run" / "snapshots")).read_latest().state
    assert {state["train_state"]["run_id"]} == {*MemoryTracker.runs}


def test_a_tracker_that_is_added_to_a_complete_run_gets_it_once(tmp_path):
    train(tmp_path, tracker__wandb=False)
    for _ in range(2):
        train(tmp_path)
    (points,) = MemoryTracker.runs.values()
    assert [*points] == [*range(1, 13)]
    assert len(MemoryTracker.results) == 2


def test_a_run_from_the_snapshot_of_another_run_has_its_own_id(tmp_path):
    train(tmp_path / "a", trainer__max_steps=8)
    train(tmp_path / "b", run__resume=f"{tmp_path}/a/run/snapshots")
    first, second = MemoryTracker.runs.values()
    assert ([*first], [*second]) == ([*range(1, 9)], [*range(9, 13)])
