"""How a run ends, when it saves and what it keeps: early stopping, preemption, intervals,
milestones.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from launching import TINY, committed
from multiprocess.ranks import configure

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.distributed.strategies.base import Strategy
from mingpt_ddp.errors import ConfigError, StorageUnavailableError, TrainingError
from mingpt_ddp.metrics.jsonl import read_history
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.manager import RunState, SnapshotManager
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training.after_evaluation import Validation
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.hooks.observers import Hooks
from mingpt_ddp.training.run import train_run
from mingpt_ddp.training.saves import resume, save_schedule
from mingpt_ddp.training.saves.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import TrainState, count_patience, has_stopped_early
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Trainable

# No loss is lower than another by 100 nats: the first evaluation, at step 2, remains the best.
SETTINGS = [
    *TINY,
    "trainer.device=cpu",
    "trainer.eval_every=2",
    "trainer.min_delta=100",
    "optimizer.schedule_steps=12",
]
# snapshots are kept
ALL = ("snapshot.keep_last=100", "snapshot.keep_best=false", "trainer.eval_every=null")
NOW = 2e6  # seconds


def train(root: Path, *overrides: str, interrupt: SignalHandler | None = None) -> dict[str, Any]:
    """Train in this process; return result.json."""
    config = from_mapping(configure(*SETTINGS, f"run.root={root}", "run.name=run", *overrides))
    runtime = Runtime(config, DistEnv())
    train_run(config, runtime, {}, interrupt)
    runtime.close()
    return read_result(root / "run")


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_run_returns_the_metrics_of_the_validation_split(tmp_path, is_complete):
    """Also of a run that was complete."""
    result = train(tmp_path) if is_complete else None
    config = from_mapping(configure(*SETTINGS, f"run.root={tmp_path}", "run.name=run"))
    runtime = Runtime(config, DistEnv())
    metrics = train_run(config, runtime, {})
    runtime.close()
    result = result or read_result(tmp_path / "run")
    assert metrics.keys() >= {"loss", "bits_per_byte"}
    assert metrics == {name: result[f"val_{name}"] for name in metrics}


def test_a_result_has_the_number_of_parameters(tmp_path):
    result = train(tmp_path)
    (file,) = tmp_path.glob("run/snapshots/step_00000012/model.safetensors")
    tensors = safetensors.torch.load_file(file)
    assert result["parameters"] == sum(tensor.numel() for tensor in tensors.values())


def before_each_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], object]) -> None:
    """Call `action` with the number of each step before its passes."""
    original = TrainStep.passes

    def passes(train_step: TrainStep, number: int) -> Any:
        action(number)
        return original(train_step, number)

    monkeypatch.setattr(TrainStep, "passes", passes)


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be NOW for the save schedule, however slow the machine is."""
    clock = SimpleNamespace(monotonic=lambda: NOW, perf_counter=time.perf_counter)
    monkeypatch.setattr(save_schedule, "time", clock)


class InterruptedAt(SignalHandler):
    """Receives SIGTERM before a step's passes, and says that this was `seconds` earlier."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        super().__init__()

        def receive(number: int) -> None:
            if number == step:
                self.signal_name, self.received_at = "SIGTERM", time.monotonic() - seconds

        before_each_step(monkeypatch, receive)


def test_a_run_stops_early_and_its_patience_survives_a_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    part = train(tmp_path, "trainer.patience=2", "trainer.max_steps=4")
    assert (part["status"], part["step"], part.get("stopped_early")) == ("complete", 4, None)
    result = train(tmp_path, "trainer.patience=2")
    assert (result["status"], result["step"], result["stopped_early"]) == ("complete", 6, True)
    assert "stopped early at step 6: trainer.patience=2 evaluations" in caplog.text
    caplog.clear()
    again = train(tmp_path, "trainer.patience=2")
    assert all(
        again[key] == result[key]
        for key in ("status", "step", "stopped_early", "val_loss", "best_val_loss")
    )
    assert "stopped early" not in caplog.text, "nothing is trained or evaluated again"
    further = train(tmp_path, "trainer.patience=3")
    assert (further["step"], further["stopped_early"]) == (8, True)
    last = train(tmp_path)
    assert (last["status"], last["step"], last.get("stopped_early")) == ("complete", 12, None)


ENDS = pytest.mark.parametrize(
    ("settings", "last"), [([], 12), (["trainer.patience=2"], 6)], ids=["steps", "patience"]
)


@ENDS
def test_a_run_interrupted_in_its_last_step_ends_once(settings, last, tmp_path, monkeypatch):
    """Its last snapshot lacks the evaluation, which the next start makes, and further ones find in
    metrics.jsonl.
    """
    called: list[str] = []
    monkeypatch.setattr(
        Hooks, "call", lambda hooks, event, *_: called.append(event) if event != "step" else None
    )
    settings = [*settings, "snapshot.keep_last=1"]
    expected = train(tmp_path / "whole", *settings)
    interrupted = train(tmp_path, *settings, interrupt=InterruptedAt(last, monkeypatch))
    assert (interrupted["status"], interrupted["step"]) == ("preempted", last)
    for events in (["evaluate", "end"], [], []):
        called.clear()
        result = train(tmp_path, *settings)
        changing = {"wall_seconds", "goodput"}
        assert {k: result[k] for k in result.keys() - changing} == {
            k: expected[k] for k in expected.keys() - changing
        }
        assert called == events
        assert committed(tmp_path / "run") == committed(tmp_path / "whole" / "run")
    assert train(tmp_path)["step"] == 12


@ENDS
def test_a_run_killed_between_its_last_snapshot_and_the_retention(settings, last, tmp_path):
    settings = [*settings, "snapshot.keep_best=false"]
    train(tmp_path, *settings, "snapshot.keep_last=2")
    metrics = tmp_path / "run" / "metrics.jsonl"
    *before, end = metrics.read_text().splitlines(keepends=True)
    assert '"complete"' in end
    metrics.write_text("".join(before))
    assert train(tmp_path, *settings, "snapshot.keep_last=1")["step"] == last
    assert committed(tmp_path / "run") == [last]


def test_patience_counts_evaluations_without_a_loss_lower_by_min_delta():
    state, counts = TrainState(), []
    for step, loss in enumerate([3.0, 2.5, 2.45, 2.41, 2.3, 2.6], start=1):
        state.step = state.val_step = step
        state.val_loss = loss
        count_patience(state, min_delta=0.1)
        counts.append(state.evaluations_above)
    assert counts == [0, 0, 1, 2, 0, 1]  # 2.41 is above 2.5 - 0.1
    assert not has_stopped_early(state, None)
    assert not has_stopped_early(state, 2)
    assert has_stopped_early(state, 1)
    state.step += 1  # has trained on, with a larger patience
    assert not has_stopped_early(state, 1)


def test_patience_needs_evaluations():
    with pytest.raises(
        ConfigError, match=r"trainer.patience=2 needs evaluations .* set trainer.eval_every"
    ):
        configure("trainer.patience=2", "trainer.eval_every=null")


@pytest.mark.parametrize("settings", [[], ["trainer.ema=0.9"]], ids=["", "ema"])
def test_the_last_sample_is_generated_while_the_last_snapshot_is_written(
    settings, tmp_path, monkeypatch
):
    train(tmp_path / "whole", *settings)
    started: list[int] = []
    sampled = threading.Event()
    start, write, log_sample = SnapshotManager.save, Storage.write, Validation.log_sample

    def note_start(manager: SnapshotManager, run: RunState) -> None:
        started.append(run.step)
        start(manager, run)

    def write_after_sampling(storage: Storage, name: str, content: Any) -> None:
        if name == "step_00000012/model.safetensors":
            assert sampled.wait(200)
        write(storage, name, content)

    def sample(validation: Validation) -> None:
        assert started[-1] == 12
        log_sample(validation)
        sampled.set()

    monkeypatch.setattr(SnapshotManager, "save", note_start)
    monkeypatch.setattr(Storage, "write", write_after_sampling)
    monkeypatch.setattr(Validation, "log_sample", sample)
    train(tmp_path, *settings)
    saved = [
        path / "run" / "snapshots" / "step_00000012" for path in (tmp_path / "whole", tmp_path)
    ]
    files = [
        {file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in saved
    ]
    assert len(files[0]) >= 2
    assert files[0] == files[1]


def test_milestones_are_saved_and_kept(tmp_path):
    """Also if no other snapshot is due at their steps."""
    train(tmp_path, "snapshot.keep_every=5", "snapshot.keep_last=1", "snapshot.keep_best=false")
    kept = sorted(path.name for path in (tmp_path / "run" / "snapshots").glob("step_*"))
    assert kept == ["step_00000005", "step_00000010", "step_00000012"]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (["every_steps=5"], [5, 10, 12]),
        (["every_steps=null"], [12]),
        (["every_steps=null", "every_epochs=1"], [4, 8, 12]),
        (["every_steps=6", "every_epochs=1"], [4, 6, 8, 12]),
        (["every_steps=null", "every_minutes=1e-9"], [*range(1, 13)]),
        (["every_steps=null", "every_minutes=1"], [12]),
        (["every_steps=5", "keep_every=4"], [4, 5, 8, 10, 12]),
    ],
)
def test_a_run_saves_when_the_configuration_says(settings, steps, tmp_path):
    overrides = [f"snapshot.{setting}" for setting in settings]
    (tmp_path / "text.txt").write_text("a small text " * 75)  # epochs of 4 steps
    text = [f"data.path={tmp_path}/text.txt", "data.truncate=1"]
    train(tmp_path, *ALL, *overrides, "snapshot.background=false", *text)
    assert committed(tmp_path / "run") == steps


def test_an_automatic_interval_follows_from_the_measured_cost(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    asked = []

    def automatic_interval(cost_s: float, mtbf_s: float, durable_s: float) -> float:
        asked.append((cost_s, mtbf_s, durable_s))
        return 0.0 if len(asked) < 3 else 1e6

    monkeypatch.setattr(save_schedule, "FIRST_S", 0.0)
    monkeypatch.setattr(save_schedule, "automatic_interval", automatic_interval)
    begin = time.perf_counter()
    train(
        tmp_path,
        *ALL,
        "snapshot.every_steps=auto",
        "snapshot.mtbf_hours=7",
        "snapshot.background=false",
    )
    elapsed = time.perf_counter() - begin
    assert committed(tmp_path / "run") == [1, 2, 3, 12], (
        "the cost of the first is known a step later, the third is followed by a pause"
    )
    assert all(
        0 < cost_s < 60 and mtbf_s == 7 * 3600 and 0 < durable_s < 60
        for cost_s, mtbf_s, durable_s in asked
    )
    assert sum(cost_s for cost_s, _, _ in asked) < elapsed
    logged = [record for record in caplog.records if "is due in" in record.getMessage()]
    assert logged[-1].getMessage() == "the next snapshot is due in 1000000.0 s"
    assert all(record.__dict__["file_only"] for record in logged)


@pytest.mark.parametrize(
    ("every_steps", "every_minutes", "elapsed", "is_due"),
    [
        ("auto", None, 29.0, False),
        ("auto", None, 30.0, True),
        ("auto", 2.0, 29.0, False),
        (None, 2.0, 119.0, False),
        (None, 2.0, 120.0, True),
        (7, None, 1e6, False),
    ],
)
def test_a_snapshot_is_due_by_the_clock(every_steps, every_minutes, elapsed, is_due, monkeypatch):
    schedule = object.__new__(SaveSchedule)
    schedule.snapshot = SimpleNamespace(every_steps=every_steps, every_minutes=every_minutes)
    schedule._since, schedule._interval_s = NOW - elapsed, 30.0
    stop_clock(monkeypatch)
    assert schedule.is_due() is is_due


def test_a_save_that_is_due_starts_when_the_one_in_progress_has_finished(tmp_path, monkeypatch):
    """It is asked at every step, without waiting for a slow one."""
    original = SnapshotManager.wait
    seen: list[int] = []

    def wait(manager: SnapshotManager, until: float | None = None) -> bool:
        return original(manager, until) and not (until is not None and seen[-1] in (5, 6))

    before_each_step(monkeypatch, seen.append)
    monkeypatch.setattr(SnapshotManager, "wait", wait)
    train(tmp_path, *ALL, "snapshot.every_steps=5", "snapshot.background=false")
    assert committed(tmp_path / "run") == [7, 10, 12]


def test_a_foreground_save_is_durable_before_the_next_step(tmp_path, monkeypatch):
    seen = []
    before_each_step(monkeypatch, lambda number: seen.append(committed(tmp_path / "run")))
    train(
        tmp_path,
        *ALL,
        "snapshot.every_steps=5",
        "snapshot.keep_every=3",
        "snapshot.background=false",
    )
    assert seen == [[s for s in (3, 5, 6, 9, 10) if s < number] for number in range(1, 13)]


def test_a_state_between_two_log_lines_is_saved_whole(tmp_path, monkeypatch):
    """The losses since the last line, the counters and the averaged weights survive a crash."""
    settings = [
        *ALL,
        "trainer.log_every=5",
        "trainer.ema=0.9",
        "model.dropout=0.1",
        "snapshot.background=false",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *settings)

    def crash(number: int) -> None:
        if number == 10:
            raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        before_each_step(patched, crash)
        train(parts, *settings)
    begin = time.perf_counter()
    before_each_step(monkeypatch, lambda _: time.sleep(0.02))
    result = train(parts, *settings)
    elapsed = time.perf_counter() - begin
    logged = [
        read_history(root / "run" / "metrics.jsonl").series("train_loss") for root in (whole, parts)
    ]
    assert [step for step, _ in logged[0]] == [5, 10, 12]
    assert logged[0] == logged[1]
    last = [root / "run" / "snapshots" / "step_00000012" for root in (whole, parts)]
    files = [
        {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
        for directory in last
    ]
    assert len(files[0]) == 3
    assert files[0] == files[1]
    state = json.loads((last[1] / "state.json").read_text())["train_state"]
    assert 0 < state["stall_seconds"] < state["wall_seconds"] <= result["wall_seconds"]
    first = json.loads((last[1].parent / "step_00000008" / "state.json").read_text())[
        "train_state"
    ]["wall_seconds"]
    assert 0.08 < state["wall_seconds"] - first < elapsed, "four steps"


def test_a_signal_saves_its_step_within_the_grace_period(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    result = train(tmp_path, *ALL, interrupt=InterruptedAt(7, monkeypatch))
    assert (result["status"], result["step"], committed(tmp_path / "run")) == (
        "preempted",
        7,
        [4, 7],
    )
    assert "preempted at step 7; rerun the same command to resume" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "kept", "message"),
    [
        (["snapshot.every_steps=4"], [4], "the last one is of step 4"),
        (["snapshot.every_steps=null"], [], "there is no snapshot yet"),
    ],
)
def test_a_signal_that_leaves_no_time_keeps_the_older_snapshot(
    settings, kept, message, tmp_path, monkeypatch, caplog
):
    """The grace period of 60 seconds began 60 seconds before."""
    caplog.set_level(logging.INFO, "mingpt_ddp")
    late = InterruptedAt(7, monkeypatch, seconds=60.0)
    settings = [*ALL, *settings, "snapshot.grace_seconds=60", "snapshot.background=false"]
    result = train(tmp_path, *settings, interrupt=late)
    assert (result["status"], result["step"], committed(tmp_path / "run")) == ("preempted", 7, kept)
    assert f"preempted at step 7 without time for a snapshot: {message}" in caplog.messages


@pytest.mark.parametrize(("durable_s", "kept"), [(None, [4, 7]), (39.0, [4, 7]), (41.0, [4])])
def test_a_signal_saves_if_a_save_fits_the_grace_period(durable_s, kept, tmp_path, monkeypatch):
    """20 of its 60 seconds have passed."""
    signalled: list[bool] = []
    saves: list[int] = []
    waits: list[float] = []
    original_save, original_wait = SnapshotManager.save, SnapshotManager.wait

    def save(manager: SnapshotManager, run: RunState) -> None:
        saves.append(run.step)
        assert saves.count(7) < 2
        original_save(manager, run)

    def wait(manager: SnapshotManager, until: float | None = None) -> bool:
        if signalled:
            assert until is not None
            waits.append(until - NOW)
            until = None
        return original_wait(manager, until)

    stop_clock(monkeypatch)
    monkeypatch.setattr(InterruptedAt, "elapsed", lambda _: signalled.append(True) or 20.0)
    monkeypatch.setattr(
        SnapshotManager, "durable_s", property(lambda _: durable_s, lambda *_: None), raising=False
    )
    monkeypatch.setattr(SnapshotManager, "save", save)
    monkeypatch.setattr(SnapshotManager, "wait", wait)
    settings = [*ALL, "snapshot.grace_seconds=60"]
    result = train(tmp_path, *settings, interrupt=InterruptedAt(7, monkeypatch))
    assert (result["status"], committed(tmp_path / "run")) == ("preempted", kept)
    assert waits == [40.0] * len(kept)


def test_a_storage_that_is_away_does_not_hide_a_signal(tmp_path, monkeypatch, caplog):
    def refuse(manager: SnapshotManager, until: float | None = None) -> bool:
        raise StorageUnavailableError("no answer")

    def elapsed(_: InterruptedAt) -> float:
        monkeypatch.setattr(SnapshotManager, "wait", refuse)
        return 0.0

    monkeypatch.setattr(InterruptedAt, "elapsed", elapsed)
    settings = [*ALL, "snapshot.background=false"]
    result = train(tmp_path, *settings, interrupt=InterruptedAt(7, monkeypatch))
    assert (result["status"], committed(tmp_path / "run")) == ("preempted", [4])
    assert (
        "preempted at step 7 without time for a snapshot: the last one is of step 4"
        in caplog.messages
    )


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, monkeypatch):
    """Where no step is checked, as on a GPU."""
    original = AnomalyPolicy.__init__

    def init(policy: AnomalyPolicy, run: Any) -> None:
        original(policy, run)
        policy.checks_every_step = False

    def spoil(strategy: Strategy, *arguments: Any) -> torch.Tensor:
        norm = clip(strategy, *arguments)
        return norm * float("inf") if seen[-1] == 8 else norm

    monkeypatch.setattr(AnomalyPolicy, "__init__", init)
    clip = Strategy.clip_grad_norm
    seen: list[int] = []
    before_each_step(monkeypatch, seen.append)
    monkeypatch.setattr(Strategy, "clip_grad_norm", spoil)
    message = r"step 8 or one shortly before it has loss \d.* and gradient norm inf; run again with a lower"  # noqa: E501
    with pytest.raises(TrainingError, match=message):
        train(tmp_path, *ALL, "trainer.log_every=100", "snapshot.background=false")
    assert committed(tmp_path / "run") == [4]


def test_the_last_save_is_tried_again(tmp_path, monkeypatch):
    """Nothing is committed by its first try."""
    tries = []
    original = SnapshotManager.save

    def save(manager: SnapshotManager, run: RunState) -> None:
        tries.append(run.step)
        if len(tries) > 1:
            original(manager, run)

    monkeypatch.setattr(SnapshotManager, "save", save)
    train(tmp_path, *ALL, "snapshot.every_steps=null")
    assert (tries, committed(tmp_path / "run")) == ([12, 12], [12])


def test_a_rollback_restores_the_newest_snapshot(tmp_path, monkeypatch):
    """A gradient is not finite once: the steps since the snapshot are repeated with the same
    weights and moments.
    """
    losses: list[tuple[int, float]] = []
    steps: list[int] = []
    original = TrainStep.passes
    original_clip = Strategy.clip_grad_norm

    def passes(train_step: TrainStep, number: int) -> Any:
        steps.append(number)
        found = original(train_step, number)
        losses.append((number, float(found["loss"])))
        return found

    def spoil_once(strategy: Strategy, parameters: Any, limit: Any) -> torch.Tensor:
        if steps[-1] == 7 and len(steps) == 7:
            parameters[0].grad.fill_(float("nan"))
        return original_clip(strategy, parameters, limit)

    averages: list[bool] = []
    original_restore = resume.restore

    def restore(found: Snapshot, trainable: Trainable, scaler: Any) -> TrainState:
        state = original_restore(found, trainable, scaler)
        average = trainable.average.state()["ema"]
        averages.append(all(torch.equal(found.ema[name], each) for name, each in average.items()))
        return state

    monkeypatch.setattr(TrainStep, "passes", passes)
    monkeypatch.setattr(Strategy, "clip_grad_norm", spoil_once)
    monkeypatch.setattr(resume, "restore", restore)
    train(tmp_path, *ALL, "trainer.on_nonfinite=rollback", "trainer.ema=0.9")
    assert averages == [True]
    assert losses[7:9] == losses[4:6], "steps 5 and 6, after the snapshot of step 4"
    assert committed(tmp_path / "run") == [4, 8, 12]
