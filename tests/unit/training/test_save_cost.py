"""By how much a save slows the steps beside it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.training.save_cost import SaveCost
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import TrainState


def test_steps_beside_a_save_are_compared_with_the_others():
    cost = SaveCost()
    for seconds in (1.0, 3.0):  # the mean is 2
        assert cost.add_step(seconds, is_saving=False) == 0.0
    assert [cost.add_step(seconds, is_saving=True) for seconds in (2.5, 1.75)] == [0.5, -0.25]
    assert cost.seconds == 0.25


def test_without_other_steps_nothing_is_known():
    cost = SaveCost()
    assert cost.add_step(2.0, is_saving=True) == 0.0
    assert cost.seconds == 0.0


def test_the_mean_follows_a_change_of_pace():
    cost = SaveCost()
    for seconds in [1.0] * 100 + [2.0] * 100:
        cost.add_step(seconds, is_saving=False)
    assert cost.add_step(2.0, is_saving=True) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(
    ("seconds", "earlier", "expected"),
    [(3.0, None, 3.0), (-1.0, None, 0.0), (3.0, 1.0, 1.5), (-1.0, 1.0, 0.75)],
)
def test_the_cost_of_a_snapshot_is_a_mean(seconds, earlier, expected):
    cost = SaveCost()
    cost.seconds = seconds
    assert cost.mean(earlier) == expected


@pytest.mark.parametrize(("device", "slower_s"), [("cpu", 3.0), ("cuda", 0.0)])
def test_the_schedule_counts_slower_steps_as_a_stall(device, slower_s, monkeypatch):
    """Steps of 2, 2, 4 and 3 seconds, the last two beside a save; the third stalls for 1 more."""
    times = iter([0.0, 2.0, 10.0, 12.0, 20.0, 25.0, 30.0, 33.0])
    clock = SimpleNamespace(perf_counter=lambda: next(times), monotonic=time.monotonic)
    monkeypatch.setattr("mingpt_ddp.training.save_schedule.time", clock)
    schedule = SaveSchedule.__new__(SaveSchedule)
    schedule._cost = SaveCost()
    schedule.manager = SimpleNamespace(has_save=False)
    runtime = SimpleNamespace(device=torch.device(device))
    schedule.context = SimpleNamespace(runtime=runtime, state=TrainState())
    for is_saving, stall_s in [(False, 0.0), (False, 0.0), (True, 1.0), (True, 0.0)]:
        schedule.manager.has_save = is_saving
        with schedule.timed_step():
            schedule._cost.seconds += stall_s
    assert schedule.context.state.stall_seconds == slower_s
    assert schedule._cost.seconds == slower_s + 1.0
