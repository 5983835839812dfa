"""Young's snapshot interval by hand; test_availability.py simulates it. And what counts as a stall
of training on a device that works behind the host.
"""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
from multiprocess.ranks import configure
from queued_device import QueuedDevice

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.training.saves.save_schedule import (
    SaveSchedule,
    automatic_interval,
    young_interval,
)
from mingpt_ddp.training.train_state import TrainState

MINUTE, HOUR = 60.0, 3600.0


def test_young_by_hand():
    """sqrt(2 * 2 * 100)."""
    assert young_interval(2, 100) == 20


@pytest.mark.parametrize(
    ("cost", "mtbf", "durable", "expected"),
    [
        (0, 1000, 7, 7),
        (2, 10_000, 60, 200),
        (2, 100, 60, 60),  # the asynchronous write takes longer than Young's interval
        (8, 100, 10, 80),  # training goes on, however often it fails
    ],
)
def test_an_automatic_interval(cost, mtbf, durable, expected):
    assert automatic_interval(cost, mtbf, durable) == expected


class Staging:
    """A manager whose save is staged, or its save in progress done, at a time of the host."""

    quick_deadline = math.inf
    durable_s: float | None = None

    def __init__(self, device: QueuedDevice, staged_at: float) -> None:
        self.device = device
        self.staged_at = staged_at

    @property
    def is_staging(self) -> bool:
        return self.device.time < self.staged_at

    def wait_for_staging(self) -> None:
        self.device.wait_until(self.staged_at)

    def wait(self, until: float) -> bool:
        self.wait_for_staging()
        return False


def schedule_of(staged_at: float) -> tuple[SaveSchedule, QueuedDevice]:
    """Return the schedule of a run that has queued the passes of a step, of 10 seconds."""
    config = from_mapping(configure("trainer.device=cpu", "snapshot.every_steps=1"))
    device = QueuedDevice(Runtime(config, DistEnv()))
    meter = Meter(device, 1, "tokens")
    staging = Staging(device, staged_at)
    run = SimpleNamespace(config=config, state=TrainState(step=1), snapshots=staging)
    meter.record({"loss": torch.zeros(())}, torch.zeros(()), data_time_s=0.0)
    device.queue(10.0)
    return SaveSchedule(run, None, meter, None), device


@pytest.mark.parametrize(("staged_at", "stall_s"), [(4.0, 0.0), (13.0, 3.0)])
@pytest.mark.parametrize("call", ["wait_for_staging", "maybe_save"])
def test_passes_that_a_device_still_computes_are_no_stall(call, staged_at, stall_s):
    schedule, _ = schedule_of(staged_at)
    if call == "wait_for_staging":
        schedule.wait_for_staging()
    else:
        schedule.maybe_save(is_due=True)
    assert schedule.state.stall_seconds == schedule._stall_s == stall_s
    assert schedule.meter.read()["speed/step_ms"] == 10e3


def test_the_host_waits_for_the_device_only_if_it_must_wait_anyway():
    schedule, device = schedule_of(staged_at=0.0)
    schedule.wait_for_staging()
    schedule.manager.quick_deadline = 0.0  # a slow save is asked, not waited for
    schedule.maybe_save(is_due=True)
    assert device.time == 0.0


def auto_schedule(state: TrainState, mtbf_hours: float = 24.0):
    """Return the schedule of a run with every_steps=auto, and the manager that it asks."""
    config = from_mapping(
        configure("snapshot.every_steps=auto", f"snapshot.mtbf_hours={mtbf_hours}")
    )
    manager = SimpleNamespace(durable_s=None, last_step=None, wait=lambda: True)
    run = SimpleNamespace(config=config, state=state, snapshots=manager)
    return SaveSchedule(run, None, None, None), manager


def test_the_first_snapshot_of_a_run_measures_the_cost():
    schedule, manager = auto_schedule(TrainState())
    assert not schedule.is_due()
    assert schedule._interval_s == 30
    schedule._begin_interval()  # when the first save starts
    assert schedule._interval_s == 30
    schedule._stall_s += 2.0
    manager.durable_s, manager.last_step = 3.0, 5
    assert not schedule.is_due()  # a question, which changes nothing
    assert schedule._interval_s == 30
    schedule.take_result()
    assert schedule._interval_s == automatic_interval(2.0, 24 * HOUR, 3.0)
    state = schedule.state
    assert (state.save_stall_s, state.save_durable_s) == (2.0, 3.0)


def test_the_cost_of_a_failed_save_is_forgotten():
    """Training has waited a minute for storage that was down."""
    schedule, manager = auto_schedule(TrainState())
    manager.durable_s, manager.last_step = 3.0, 5
    schedule._stall_s += 2.0
    schedule._begin_interval()
    schedule._stall_s += 60.0
    schedule._begin_interval()
    assert schedule.state.save_stall_s == 2.0
    manager.last_step = 6
    schedule._stall_s += 6.0
    schedule._begin_interval()
    assert schedule.state.save_stall_s == 3.0


@pytest.mark.parametrize(("hours", "interval_s"), [(240.0, 30.0), (24.0, 30.0), (1 / 60, 0.8)])
def test_the_first_snapshot_comes_early_where_failures_are_frequent(hours, interval_s):
    schedule, _ = auto_schedule(TrainState(), mtbf_hours=hours)
    assert schedule._interval_s == pytest.approx(interval_s, rel=0.05)


def test_a_restarted_attempt_knows_the_cost():
    schedule, _ = auto_schedule(TrainState(save_stall_s=2.0, save_durable_s=3.0))
    assert schedule._interval_s == automatic_interval(2.0, 24 * HOUR, 3.0)


def test_the_time_until_training_begins_is_startup(monkeypatch):
    times = iter([10.0, 15.0, 18.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    schedule, _ = auto_schedule(TrainState())
    schedule.begin()
    state = schedule.update_wall_time()
    assert (state.wasted_seconds, state.wall_seconds) == (5.0, 3.0)
