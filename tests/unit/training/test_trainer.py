"""Real runs of twelve steps: how they end, when they log and save, and what they keep."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from launching import TINY, committed
from multiprocess.ranks import configure
from torch import Tensor

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.launch.channels import PrunerCallback
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import StorageUnavailableError, TrainingError
from mingpt_ddp.metrics.jsonl import read_history
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.run import train_run
from mingpt_ddp.training.saves import save_schedule
from mingpt_ddp.training.train_state import (
    Progress,
    TrainState,
    has_stopped_early,
    record_evaluation,
)
from mingpt_ddp.training.train_step import TrainStep

# No loss falls by 100 nats, so for trainer.patience the evaluation of step 2 remains the best.
SETTINGS = [
    *TINY,
    "trainer.device=cpu",
    "trainer.eval_every=2",
    "trainer.min_delta=100",
    "optimizer.schedule_steps=12",
]
KEEP_ALL = ("snapshot.keep_last=100", "snapshot.keep_best=false", "trainer.eval_every=null")
pytestmark = pytest.mark.usefixtures("one_thread")


def metrics_of(
    root: Path,
    *overrides: str,
    signals: SignalHandler | None = None,
    pruner: PrunerCallback | None = None,
) -> dict[str, float] | None:
    """Train in this process. Return the metrics from train_run."""
    config = from_mapping(configure(*SETTINGS, f"run.root={root}", "run.name=run", *overrides))
    runtime = Runtime(config, DistEnv())
    try:
        return train_run(Job(config), runtime, signals, pruner=pruner)
    finally:
        runtime.close()


def train(root: Path, *overrides: str, **observers: Any) -> dict[str, Any]:
    """Train in this process. Return the content of result.json."""
    metrics_of(root, *overrides, **observers)
    return read_result(root / "run")


def series(root: Path, name: str) -> list[tuple[int, float]]:
    return read_history(root / "run" / "metrics.jsonl").series(name)


def steps_of(root: Path, name: str) -> list[int]:
    return [step for step, _ in series(root, name)]


def tensor_files(root: Path, step: int = 12) -> dict[str, bytes]:
    directory = root / "run" / "snapshots" / f"step_{step:08d}"
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


def before_each_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], object]) -> None:
    """Call `action` with the step number before the passes of each step."""
    original = TrainStep.passes

    def passes(train_step: TrainStep, number: int) -> Any:
        action(number)
        return original(train_step, number)

    monkeypatch.setattr(TrainStep, "passes", passes)


class InterruptedAt(SignalHandler):
    """A handler that gets SIGTERM before the passes of a step, as if it came `seconds` earlier."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        super().__init__()

        def receive(number: int) -> None:
            if number == step:
                self.signal_name, self.received_at = "SIGTERM", time.monotonic() - seconds

        before_each_step(monkeypatch, receive)


# Measurements and results


def test_a_run_returns_and_records_its_last_evaluation(tmp_path):
    """A run that was already complete returns it too."""
    metrics = metrics_of(tmp_path)
    result = read_result(tmp_path / "run")
    assert metrics.keys() >= {"loss", "bits_per_byte"}
    assert metrics == {name: result[f"val_{name}"] for name in metrics}
    assert metrics_of(tmp_path) == metrics
    tensors = safetensors.torch.load(tensor_files(tmp_path)["model.safetensors"])
    assert result["parameters"] == sum(tensor.numel() for tensor in tensors.values())


def test_what_is_due_at_which_step(tmp_path, caplog):
    """The last step always logs, evaluates and samples."""
    caplog.set_level(logging.INFO, "mingpt_ddp")
    train(tmp_path, "trainer.log_every=5", "trainer.eval_every=8", "trainer.sample_every=7")
    assert steps_of(tmp_path, "train_loss") == [5, 10, 12]
    assert steps_of(tmp_path, "val_loss") == [8, 12]
    assert re.findall(r"step (\d+), a sample", caplog.text) == ["7", "12"]


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    """No snapshot with such weights is saved."""

    def spoil(step: int, weights: Mapping[str, Tensor]) -> None:
        if step == 6:
            for weight in weights.values():
                weight.fill_(torch.nan)

    monkeypatch.setitem(BUILDERS["action"], "update mine.spoil", spoil)
    with pytest.raises(TrainingError, match="validation loss of step 6 is nan; start again with"):
        train(tmp_path, "snapshot.every_steps=2", "snapshot.background=false")
    assert committed(tmp_path / "run")[-1] == 4


# How a run ends


def test_a_run_stops_early_and_its_patience_survives_a_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    part = train(tmp_path, "trainer.patience=1", "trainer.max_steps=4")
    assert (part["status"], part["step"], part.get("stopped_early")) == ("complete", 4, None)
    assert "stopped early" not in caplog.text, "it was the last step"
    result = train(tmp_path, "trainer.patience=2")
    assert (result["status"], result["step"], result["stopped_early"]) == ("complete", 6, True)
    assert "stopped early at step 6: trainer.patience=2 evaluations" in caplog.text
    caplog.clear()
    again = train(tmp_path, "trainer.patience=2")
    kept = ("status", "step", "stopped_early", "val_loss", "best_val_loss")
    assert [again[key] for key in kept] == [result[key] for key in kept]
    assert "stopped early" not in caplog.text, "nothing is trained or evaluated again"
    further = train(tmp_path, "trainer.patience=3")
    assert (further["step"], further["stopped_early"]) == (8, True)
    last = train(tmp_path)
    assert (last["status"], last["step"], last.get("stopped_early")) == ("complete", 12, None)


def test_a_pruner_sees_each_evaluation_and_may_end_the_run(tmp_path):
    """A resumed run asks for the step of its snapshot. The last step is reported and not pruned."""
    judged: list[tuple[int, float]] = []

    def never(step: int, metrics: Mapping[str, float]) -> None:
        judged.append((step, metrics["loss"]))

    train(tmp_path, "trainer.max_steps=8", pruner=never)
    assert judged == series(tmp_path, "val_loss")
    assert [step for step, _ in judged] == [2, 4, 6, 8]
    ended = train(tmp_path, pruner=lambda *_: "too high")
    assert (ended["status"], ended["step"]) == ("pruned", 8)
    last = train(tmp_path, pruner=lambda step, _: "too high" if step == 12 else None)
    assert (last["status"], last["step"]) == ("complete", 12)


ENDS = pytest.mark.parametrize(
    ("settings", "last"), [([], 12), (["trainer.patience=2"], 6)], ids=["steps", "patience"]
)


@ENDS
def test_a_run_interrupted_in_its_last_step_ends_once(settings, last, tmp_path, monkeypatch):
    """Its last snapshot lacks the last evaluation. The next start evaluates, and later starts find
    the result in metrics.jsonl.
    """
    called: list[str] = []
    for event in ("evaluate", "end"):
        hooks = BUILDERS["hook"]
        monkeypatch.setitem(hooks, f"{event} mine.note", lambda *_, e=event: called.append(e))
    settings = [*settings, "snapshot.keep_last=1"]
    expected = train(tmp_path / "whole", *settings)
    interrupted = train(tmp_path, *settings, signals=InterruptedAt(last, monkeypatch))
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
def test_a_run_killed_between_its_last_snapshot_and_pruning(settings, last, tmp_path):
    settings = [*settings, "snapshot.keep_best=false"]
    train(tmp_path, *settings, "snapshot.keep_last=2")
    metrics = tmp_path / "run" / "metrics.jsonl"
    *before, end = metrics.read_text().splitlines(keepends=True)
    assert '"complete"' in end
    metrics.write_text("".join(before))
    assert train(tmp_path, *settings, "snapshot.keep_last=1")["step"] == last
    assert committed(tmp_path / "run") == [last]


def test_evaluations_are_recorded_for_the_best_loss_and_patience():
    """Patience counts evaluations whose loss is not lower by min_delta."""
    state = TrainState()
    for step, (loss, improved, above) in enumerate(
        [
            (3.0, True, 0),
            (2.5, True, 0),
            (2.45, True, 1),
            (2.41, True, 2),  # above 2.5 - 0.1
            (2.3, True, 0),
            (2.3, False, 1),
            (2.6, False, 2),
        ],
        start=1,
    ):
        state.step = step
        assert record_evaluation(state, {"loss": loss}, min_delta=0.1) is improved
        assert (state.val_loss, state.val_step, state.evaluations_above) == (loss, step, above)
    assert (state.best_val_loss, state.best_step, state.patience_loss) == (2.3, 5, 2.3)
    assert [has_stopped_early(state, patience) for patience in (None, 3, 2)] == [False, False, True]
    state.step += 1  # the run has continued with a larger patience
    assert not has_stopped_early(state, 2)


def test_a_sample_of_averaged_weights_changes_no_snapshot(tmp_path):
    """The last snapshot is written in the background while the sample is generated."""
    train(tmp_path / "whole", "trainer.ema=0.9", "snapshot.background=false")
    train(tmp_path, "trainer.ema=0.9")
    files = tensor_files(tmp_path / "whole")
    assert len(files) >= 3
    assert tensor_files(tmp_path) == files


# Times at which a run saves


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (["every_steps=5"], [5, 10, 12]),
        (["every_steps=null"], [12]),
        (["every_steps=5", "keep_every=4"], [4, 5, 8, 10, 12]),
    ],
)
def test_a_run_saves_when_the_configuration_says(settings, steps, tmp_path, monkeypatch):
    """A snapshot that is saved in the foreground is durable before the next step."""
    overrides = [f"snapshot.{setting}" for setting in settings]
    seen = []
    before_each_step(monkeypatch, lambda number: seen.append(committed(tmp_path / "run")))
    train(tmp_path, *KEEP_ALL, *overrides, "snapshot.background=false")
    assert seen == [[step for step in steps if step < number] for number in range(1, 13)]
    assert committed(tmp_path / "run") == steps


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (["keep_every=5", "keep_last=1", "keep_best=false"], [5, 10, 12]),
        # The loss of step 2 is the best at first. Later losses are lower.
        (["every_steps=null", "keep_last=100"], [2, 4, 6, 8, 10, 12]),
        (["every_steps=null", "keep_last=100", "keep_best=false"], [12]),
    ],
)
def test_milestones_and_the_best_are_saved_and_kept(settings, steps, tmp_path):
    """They are saved even if no other snapshot is due at their steps."""
    train(tmp_path, *(f"snapshot.{setting}" for setting in settings))
    assert committed(tmp_path / "run") == steps


def test_an_automatic_interval_follows_from_the_measured_cost(tmp_path, monkeypatch, caplog):
    """The cost of the first snapshot is known a step later."""
    caplog.set_level(logging.INFO, "mingpt_ddp")
    monkeypatch.setattr(save_schedule, "FIRST_INTERVAL_S", 0.0)
    auto = ["snapshot.every_steps=auto", "snapshot.mtbf_hours=1e9", "snapshot.background=false"]
    train(tmp_path, *KEEP_ALL, *auto)
    assert committed(tmp_path / "run") == [1, 2, 12]
    logged = [record for record in caplog.records if "is due in" in record.getMessage()]
    assert len(logged) == 3
    assert all(record.__dict__["file_only"] for record in logged)


def test_the_last_save_is_tried_again(tmp_path, monkeypatch):
    """The first try commits nothing."""
    tries = []

    def write(storage: Storage, name: str, content: Any) -> None:
        if name.startswith("step_"):
            tries.append(name)
            if len(tries) == 1:
                raise OSError("no answer")
        original(storage, name, content)

    original = Storage.write
    monkeypatch.setattr(Storage, "write", write)
    train(tmp_path, *KEEP_ALL, "snapshot.every_steps=null", "snapshot.background=false")
    assert tries.count(tries[0]) == 2
    assert committed(tmp_path / "run") == [12]


# Signals


def test_a_signal_without_time_for_the_first_snapshot(tmp_path, monkeypatch, caplog):
    """The grace period of 60 seconds began on another rank some seconds ago.

    e2e/test_preemption.py has the other cases.
    """
    caplog.set_level(logging.INFO, "mingpt_ddp")
    signals = InterruptedAt(7, monkeypatch, 60.0)
    settings = ["snapshot.grace_seconds=60", "snapshot.every_steps=null"]
    result = train(tmp_path, *KEEP_ALL, *settings, signals=signals)
    assert (result["status"], result["step"], committed(tmp_path / "run")) == ("preempted", 7, [])
    assert "without time for a snapshot: there is no snapshot" in caplog.text


def test_a_storage_that_is_down_does_not_hide_a_signal(tmp_path, monkeypatch, caplog):
    def write(storage: Storage, name: str, content: Any) -> None:
        if name.startswith("step_00000007"):
            raise StorageUnavailableError("no answer")
        original(storage, name, content)

    original = Storage.write
    monkeypatch.setattr(Storage, "write", write)
    settings = [*KEEP_ALL, "snapshot.background=false", "snapshot.max_failures=0"]
    result = train(tmp_path, *settings, signals=InterruptedAt(7, monkeypatch))
    assert (result["status"], committed(tmp_path / "run")) == ("preempted", [4])
    assert "without time for a snapshot: the newest one is from step 4" in caplog.text


# State after kills, anomalies and rollbacks


def test_the_state_between_two_log_lines_is_saved_completely(tmp_path, monkeypatch):
    """The losses since the last line, the counters and the averaged weights survive a crash."""
    settings = [
        *KEEP_ALL,
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
    result = train(parts, *settings)
    assert steps_of(whole, "train_loss") == [5, 10, 12]
    assert series(whole, "train_loss") == series(parts, "train_loss")
    files = tensor_files(whole)
    assert len(files) == 3
    assert tensor_files(parts) == files
    saved = [
        json.loads((parts / f"run/snapshots/step_{step:08d}/state.json").read_text())["train_state"]
        for step in (8, 12)
    ]
    times = [state["wall_seconds"] for state in saved]
    assert 0 < times[0] < times[1] <= result["wall_seconds"]
    assert 0 < saved[1]["stall_seconds"] < times[1]


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, step: int, value: float) -> None:
    def spoil(number: int, gradients: Mapping[str, Tensor]) -> None:
        if number == step:
            for gradient in gradients.values():
                gradient.fill_(value)

    monkeypatch.setitem(BUILDERS["action"], "gradients mine.spoil", spoil)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, monkeypatch):
    """This also holds on a GPU, where single steps are not checked."""
    never = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(AnomalyPolicy, "checks_every_step", never, raising=False)
    spoil_gradients(monkeypatch, 8, torch.inf)
    message = (
        r"step 8, or a step shortly before it, has loss \d.* and gradient norm (inf|nan); run agai"
    )
    with pytest.raises(TrainingError, match=message):
        train(tmp_path, *KEEP_ALL, "trainer.log_every=100", "snapshot.background=false")
    assert committed(tmp_path / "run") == [4]


def test_a_rollback_equals_a_skip(tmp_path, monkeypatch):
    """The steps since the snapshot are repeated with the same weights, moments and averages. The
    losses since the last line of the log are added up again.
    """
    spoil_gradients(monkeypatch, 7, torch.nan)
    settings = [*KEEP_ALL, "trainer.ema=0.9", "trainer.log_every=5"]
    for policy in ("skip", "rollback"):
        train(tmp_path / policy, *settings, f"trainer.on_nonfinite={policy}")
        assert committed(tmp_path / policy / "run") == [4, 8, 12]
    files = tensor_files(tmp_path / "skip")
    assert len(files) == 3
    assert tensor_files(tmp_path / "rollback") == files
    losses = series(tmp_path / "skip", "train_loss")
    assert [step for step, _ in losses] == [5, 10, 12]
    assert series(tmp_path / "rollback", "train_loss") == losses


def test_a_rollback_keeps_counters_of_the_whole_run():
    """They count its attempts, its skipped steps, and the lost time."""
    state = TrainState(
        step=9, wall_seconds=70.0, wasted_seconds=3.0, world_size=4, run_id="ours",
        skipped_steps=[5, 8], consecutive_skips=1,
    )  # fmt: skip
    state.roll_back(Progress(step=6, loss_sum=4.0, loss_steps=2, wall_seconds=50.0))
    assert state == TrainState(
        step=6, wall_seconds=50.0, wasted_seconds=23.0, world_size=4, run_id="ours",
        skipped_steps=[5, 8], consecutive_skips=1, loss_sum=4.0, loss_steps=2,
    )  # fmt: skip
