"""Daly's snapshot interval against the paper and numbers by hand; test_availability.py simulates
it. And what counts as a stall of training on a device that works behind the host.
"""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from multiprocess.ranks import configure
from queued_device import QueuedDevice

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.training.save_schedule import SaveSchedule, best_interval
from mingpt_ddp.training.train_state import TrainState

MINUTE, HOUR = 60.0, 3600.0
costs = st.floats(1e-3, 1e3)
mtbfs = st.floats(1e3, 1e8)
factors = st.floats(1.0, 1e3)


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(24 * HOUR, "117"), (6 * HOUR, "57"), (15 * MINUTE, "9.1")]
)
def test_the_examples_of_the_paper(mtbf, minutes):
    """Daly's figures 3 to 5, a dump of 5 minutes."""
    digits = len(minutes.partition(".")[2])
    assert f"{best_interval(5 * MINUTE, mtbf) / MINUTE:.{digits}f}" == minutes


def test_by_hand():
    """sqrt(2 * 2 * 100) = 20, sqrt(2 / 200) = 0.1: 20 * (1 + 0.1 / 3 + 0.01 / 9) - 2."""
    assert best_interval(2, 100) == pytest.approx(18.6888889)


@pytest.mark.parametrize(
    ("cost", "mtbf", "least", "expected"),
    [
        (0, 1000, 0, 0),
        (0, 1000, 7, 7),
        (0, math.inf, 7, 7),
        (2, 100, 60, 60),  # the asynchronous write takes longer than the formula's 18.7
        (2, math.inf, 0, math.inf),
        (200, 100, 0, 100),  # a snapshot takes twice the mean time between failures
        (1000, 100, 0, 100),
        (1000, 100, 300, 300),
    ],
)
def test_the_ends_of_the_range(cost, mtbf, least, expected):
    assert best_interval(cost, mtbf, least) == expected


@given(cost=st.floats(1e-3, 10), mtbf=st.floats(1e8, 1e12))
def test_rare_failures_give_young(cost, mtbf):
    assert best_interval(cost, mtbf) == pytest.approx(math.sqrt(2 * cost * mtbf), rel=1e-3)


@given(cost=costs, mtbf=mtbfs, factor=factors)
def test_dearer_snapshots_and_rarer_failures_mean_longer_intervals(cost, mtbf, factor):
    """But for the rounding of floats."""
    interval = best_interval(cost, mtbf) * (1 - 1e-12)
    assert best_interval(cost, mtbf * factor) >= interval
    assert best_interval(cost * factor, mtbf) >= interval


@given(cost=costs, mtbf=mtbfs, factor=factors)
def test_the_unit_does_not_matter(cost, mtbf, factor):
    assert best_interval(cost * factor, mtbf * factor) == pytest.approx(
        factor * best_interval(cost, mtbf)
    )


@pytest.mark.parametrize(
    "bad", [(-1, 100), (1, 0), (1, -1), (math.nan, 100), (1, math.nan), (1, 100, -1)]
)
def test_impossible_times_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        best_interval(*bad)


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
    context = SimpleNamespace(
        config=config, state=TrainState(step=1), metrics=SimpleNamespace(meter=meter)
    )
    meter.record({"loss": torch.zeros(())}, torch.zeros(()), data_time_s=0.0)
    device.queue(10.0)
    return SaveSchedule(context, Staging(device, staged_at), None, None, 1), device


@pytest.mark.parametrize(("staged_at", "stall_s"), [(4.0, 0.0), (13.0, 3.0)])
@pytest.mark.parametrize("call", ["wait_for_staging", "maybe_save"])
def test_passes_that_a_device_still_computes_are_no_stall(call, staged_at, stall_s):
    schedule, _ = schedule_of(staged_at)
    if call == "wait_for_staging":
        schedule.wait_for_staging()
    else:
        schedule.maybe_save(is_due=True)
    assert schedule.context.state.stall_seconds == schedule._cost.seconds == stall_s
    assert schedule.context.metrics.meter.read()["speed/step_ms"] == 10e3


def test_the_host_waits_for_the_device_only_if_it_must_wait_anyway():
    schedule, device = schedule_of(staged_at=0.0)
    schedule.wait_for_staging()
    schedule.manager.quick_deadline = 0.0  # a slow save is asked, not waited for
    schedule.maybe_save(is_due=True)
    assert device.time == 0.0


def auto_schedule(state: TrainState, first_s: float = math.inf, mtbf_hours: float = 24.0):
    """Return the schedule of a run with every_steps=auto, and the manager that it asks."""
    config = from_mapping(
        configure("snapshot.every_steps=auto", f"snapshot.mtbf_hours={mtbf_hours}")
    )
    manager = SimpleNamespace(durable_s=None, last_step=None)
    context = SimpleNamespace(config=config, state=state)
    return SaveSchedule(context, manager, None, None, 1, first_s), manager


def test_the_first_snapshot_of_a_run_measures_the_cost():
    schedule, manager = auto_schedule(TrainState())
    assert not schedule.is_due()
    assert schedule._interval_s == 30
    schedule._begin_interval()  # when the first save starts
    assert schedule._interval_s == 30
    schedule._cost.add_stall(2.0)
    manager.durable_s, manager.last_step = 3.0, 5
    assert not schedule.is_due()
    assert schedule._interval_s == best_interval(2.0, 24 * HOUR, 3.0)
    state = schedule.context.state
    assert (state.save_stall_s, state.save_durable_s) == (2.0, 3.0)


def test_the_cost_of_a_failed_save_is_forgotten():
    """Training has waited a minute for storage that was down."""
    schedule, manager = auto_schedule(TrainState())
    manager.durable_s, manager.last_step = 3.0, 5
    schedule._cost.add_stall(2.0)
    schedule._begin_interval()
    schedule._cost.add_stall(60.0)
    schedule._begin_interval()
    assert schedule.context.state.save_stall_s == 2.0
    manager.last_step = 6
    schedule._cost.add_stall(6.0)
    schedule._begin_interval()
    assert schedule.context.state.save_stall_s == 3.0


@pytest.mark.parametrize(("hours", "interval_s"), [(240.0, 30.0), (24.0, 30.0), (1 / 60, 0.8)])
def test_the_first_snapshot_comes_early_where_failures_are_frequent(hours, interval_s):
    schedule, _ = auto_schedule(TrainState(), mtbf_hours=hours)
    assert schedule._interval_s == pytest.approx(interval_s, rel=0.05)


def test_a_restarted_attempt_knows_the_cost():
    schedule, _ = auto_schedule(TrainState(save_stall_s=2.0, save_durable_s=3.0))
    assert schedule._interval_s == best_interval(2.0, 24 * HOUR, 3.0)


@pytest.mark.parametrize(
    ("failures", "hours", "mtbf_s"),
    [(0, 24.0, 24 * HOUR), (5, 24.0, MINUTE), (5, 0.01, 36.0)],
)
def test_failures_of_the_run_shorten_the_interval(failures, hours, mtbf_s):
    """One a minute for five minutes; the configured rate if that is higher."""
    state = TrainState(save_stall_s=0.5, save_durable_s=0.1, failures=failures)
    state.wall_seconds = 4 * MINUTE
    state.wasted_seconds = 1 * MINUTE
    schedule, _ = auto_schedule(state, mtbf_hours=hours)
    assert schedule._interval_s == best_interval(0.5, mtbf_s, 0.1)


@pytest.mark.parametrize("durable_s", [None, 3.0])
def test_after_an_attempt_without_a_snapshot_the_first_comes_early(durable_s):
    state = TrainState(save_stall_s=2.0, save_durable_s=durable_s)
    schedule, _ = auto_schedule(state, first_s=1.5)
    assert schedule._interval_s == 1.5


def test_the_time_until_training_begins_is_startup(monkeypatch):
    times = iter([10.0, 15.0, 18.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    schedule, _ = auto_schedule(TrainState())
    schedule.begin()
    state = schedule.update_wall_time()
    assert (state.wasted_seconds, state.wall_seconds) == (5.0, 3.0)
