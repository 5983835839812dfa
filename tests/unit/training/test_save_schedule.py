"""The times at which snapshots are due, and the stalls that they cause.

test_availability.py simulates Young's interval. A device may run behind the host, so that not every
wait of the host is a stall of training.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from queued_device import QueuedDevice

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.training.saves import save_schedule
from mingpt_ddp.training.saves.save_schedule import (
    SaveSchedule,
    automatic_interval,
)
from mingpt_ddp.training.train_state import TrainState

DAY = 86_400.0  # seconds


@pytest.mark.parametrize(
    ("cost", "mtbf", "durable", "expected"),
    [
        (2, 10_000, 1, 200),  # Young: sqrt(2 * 2 * 10,000)
        (0, 1000, 7, 7),
        (2, 100, 60, 60),  # the asynchronous write takes longer than Young's interval
        (8, 100, 10, 80),  # the run trains for a while between saves, however often it fails
    ],
)
def test_an_automatic_interval(cost, mtbf, durable, expected):
    assert automatic_interval(cost, mtbf, durable) == expected


# Snapshots that are due by the clock


class Clock:
    """Stands in for the module time. It moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save_schedule, "time", clock)
    return clock


def schedule_by_clock(*overrides: str, state: TrainState | None = None) -> tuple[Any, Any]:
    """Return the schedule of a run, and its snapshot manager."""
    config = from_mapping(configure(*overrides))
    manager = SimpleNamespace(durable_s=None, last_step=None, wait=lambda: True)
    run: Any = SimpleNamespace(config=config, state=state or TrainState(), snapshots=manager)
    parts: list[Any] = [None, None, None]
    return SaveSchedule(run, *parts), manager


def seconds_until_due(schedule: SaveSchedule, clock: Clock) -> float:
    """Return the number of seconds until a snapshot is due, to 0.1%. Infinity means never."""
    begin, low, high = clock.now, 0.0, 1e7
    clock.now = begin + high
    if not schedule.is_due():
        return math.inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        clock.now = begin + middle
        low, high = (low, middle) if schedule.is_due() else (middle, high)
    clock.now = begin
    return high


MEASURED = TrainState(save_stall_s=2.0, save_durable_s=3.0)


@pytest.mark.parametrize(
    ("settings", "state", "expected"),
    [
        (["every_steps=7"], TrainState(), math.inf),
        (["every_steps=null", "every_minutes=2"], TrainState(), 120),
        # The first snapshot measures the cost. If failures are frequent, it comes early.
        (["every_steps=auto", "mtbf_hours=240"], TrainState(), 30),
        (["every_steps=auto", "mtbf_hours=24"], TrainState(), 30),
        (["every_steps=auto", f"mtbf_hours={1 / 60}"], TrainState(), 0.8),
        # A restarted attempt knows the cost.
        (["every_steps=auto", "mtbf_hours=24"], MEASURED, automatic_interval(2, DAY, 3)),
    ],
)
def test_when_a_snapshot_is_due(settings, state, expected, clock):
    schedule, _ = schedule_by_clock(*(f"snapshot.{each}" for each in settings), state=state)
    assert seconds_until_due(schedule, clock) == pytest.approx(expected, rel=0.02)
    clock.now += 10
    schedule.begin()  # the time until here belongs to the start
    assert seconds_until_due(schedule, clock) == pytest.approx(expected, rel=0.02)


def test_the_time_until_training_begins_is_startup(clock):
    schedule, _ = schedule_by_clock()
    clock.now += 5
    schedule.begin()
    clock.now += 3
    state = schedule.update_wall_time()
    assert (state.wasted_seconds, state.wall_seconds) == (5.0, 3.0)


# On a device that runs behind the host


class Staging:
    """A manager whose staging, or save in progress, is done at a given time of the host."""

    quick_deadline = math.inf
    durable_s: float | None = None
    last_step: int | None = None

    def __init__(self, device: QueuedDevice, staged_at: float) -> None:
        self.device = device
        self.staged_at = staged_at

    @property
    def is_staging(self) -> bool:
        return self.device.time < self.staged_at

    def wait_for_staging(self) -> None:
        self.device.wait_until(self.staged_at)

    def wait(self, until: float = 0.0) -> bool:
        self.wait_for_staging()
        return False


def schedule_of(staged_at: float, every_steps: str = "1") -> tuple[SaveSchedule, QueuedDevice]:
    """Return the schedule of a run that has queued the passes of a step. They take 10 seconds."""
    config = from_mapping(configure("trainer.device=cpu", f"snapshot.every_steps={every_steps}"))
    device = QueuedDevice(Runtime(config, DistEnv()))
    meter = Meter(device, 1, "tokens")
    staging = Staging(device, staged_at)
    run = SimpleNamespace(config=config, state=TrainState(step=1), snapshots=staging)
    meter.record({"loss": torch.zeros(())}, torch.zeros(()), data_time_s=0.0)
    device.queue(10.0)
    return SaveSchedule(run, None, meter, None), device


@pytest.mark.parametrize(("staged_at", "stall_s"), [(4.0, 0.0), (13.0, 3.0)])
@pytest.mark.parametrize("call", ["wait_for_staging", "maybe_save"])
def test_waiting_for_passes_of_the_device_is_not_a_stall(call, staged_at, stall_s):
    schedule, _ = schedule_of(staged_at)
    if call == "wait_for_staging":
        schedule.wait_for_staging()
    else:
        schedule.maybe_save(is_due=True)
    assert schedule.state.stall_seconds == stall_s
    assert schedule.meter.read()["speed/step_ms"] == 10e3


def test_the_host_waits_for_the_device_only_if_it_must_wait_anyway():
    schedule, device = schedule_of(staged_at=0.0)
    schedule.wait_for_staging()
    schedule.manager.quick_deadline = 0.0  # a slow save is polled, not waited for
    schedule.maybe_save(is_due=True)
    assert device.time == 0.0


def test_the_first_snapshot_measures_the_cost(clock):
    """Once it is committed, its stall of 3 seconds and the time until it was durable are known."""
    schedule, _ = schedule_of(staged_at=13.0, every_steps="auto")
    schedule.wait_for_staging()
    assert seconds_until_due(schedule, clock) == pytest.approx(30, rel=0.02)
    schedule.manager.durable_s, schedule.manager.last_step = 4.0, 1
    assert seconds_until_due(schedule, clock) == pytest.approx(30, rel=0.02), "a question"
    schedule.take_result()
    assert (schedule.state.save_stall_s, schedule.state.save_durable_s) == (3.0, 4.0)
    expected = automatic_interval(3.0, DAY, 4.0)
    assert seconds_until_due(schedule, clock) == pytest.approx(expected, rel=0.02)


def test_the_cost_is_a_moving_mean_over_committed_snapshots(monkeypatch):
    """If training waits a minute because the storage is down, this is not a cost."""
    schedule, device = schedule_of(staged_at=13.0, every_steps="auto")
    monkeypatch.setattr(save_schedule, "snapshot_state", lambda *_: {})
    monkeypatch.setattr(save_schedule, "with_loaded_files", lambda *_: {})
    schedule.run.trainable, schedule.run.code = SimpleNamespace(tensors=dict), {}
    schedule.run.runtime, schedule.run.task = device, None
    schedule.train_step = SimpleNamespace(plan=None, steps=9)
    schedule.anomaly = SimpleNamespace(check=lambda *_: None)
    manager: Any = schedule.manager
    manager.save = lambda state: None
    costs = []
    for stall_s, committed in ((3, 1), (60, 1), (7, 2)):
        manager.staged_at = max(device.time, device.done_at) + stall_s
        schedule.wait_for_staging()
        manager.durable_s, manager.last_step = 4.0, committed
        schedule.save()
        costs.append(schedule.state.save_stall_s)
    assert costs == [3.0, 3.0, 4.0]
