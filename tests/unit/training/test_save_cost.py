"""By how much a save slows the steps beside it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from mingpt_ddp.training.save_cost import FIRST_STEPS, SaveCost, moving_mean
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.train_state import TrainState


def cost_after(*seconds: float) -> SaveCost:
    """Return the cost after an attempt's first steps and others of these seconds."""
    cost = SaveCost()
    for each in (*[9.0] * FIRST_STEPS, *seconds):
        assert cost.add_step(each, is_saving=False) == 0.0
    return cost


def test_steps_beside_a_save_are_compared_with_the_others():
    cost = cost_after(1.0, 3.0)  # the mean is 2
    slower = [cost.add_step(seconds, is_saving=True) for seconds in (2.5, 1.75, 2.0)]
    assert slower == [0.5, -0.25, 0.0]
    assert cost.seconds == 0.25


def test_faster_steps_do_not_make_up_for_stalls():
    cost = cost_after(2.0)
    cost.add_stall(1.0)
    assert [cost.add_step(1.0, is_saving=True) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert cost.seconds == 1.0
    cost.begin_snapshot()
    assert cost.add_step(3.0, is_saving=True) == cost.seconds == 1.0


def test_before_there_are_others_nothing_is_known():
    cost = cost_after()
    assert cost.add_step(2.0, is_saving=True) == 0.0
    assert cost.seconds == 0.0


def test_most_of_an_outlier_has_another_cause():
    assert cost_after(2.0).add_step(600.0, is_saving=True) == 6.0
    mean = 1.0 + 3.0 / 20  # the twentieth step counts four times the others
    slower = cost_after(*[1.0] * 19, 600.0).add_step(2.0, is_saving=True)
    assert slower == pytest.approx(2.0 - mean)


def test_the_mean_follows_a_change_of_pace():
    cost = cost_after(*[1.0] * 100, *[2.0] * 100)
    assert cost.add_step(2.0, is_saving=True) == pytest.approx(0.0, abs=0.01)


def test_the_cost_of_a_snapshot_is_a_mean():
    assert moving_mean(None, 3.0) == 3.0
    assert moving_mean(1.0, 3.0) == 1.5


@pytest.mark.parametrize(("device", "slower_s"), [("cpu", 3.0), ("cuda", 0.0)])
def test_the_schedule_counts_slower_steps_as_a_stall(device, slower_s, monkeypatch):
    """A step of 2 seconds; then, beside a save, of 5 and 3, of which the first stalls for 1."""
    times = iter([-9.0, 0.0, 2.0, 20.0, 25.0, 30.0, 33.0])
    clock = SimpleNamespace(perf_counter=lambda: next(times), monotonic=time.monotonic)
    monkeypatch.setattr("mingpt_ddp.training.save_schedule.time", clock)
    schedule = SaveSchedule.__new__(SaveSchedule)
    schedule._cost = cost_after()
    schedule.manager = SimpleNamespace(has_save=False)
    runtime = SimpleNamespace(device=torch.device(device))
    schedule.context = SimpleNamespace(runtime=runtime, state=TrainState())
    with pytest.raises(OSError), schedule.timed_step():  # it is not counted
        raise OSError
    for is_saving, stall_s in [(False, 0.0), (True, 1.0), (True, 0.0)]:
        schedule.manager.has_save = is_saving
        with schedule.timed_step():
            schedule.context.state.stall_seconds += stall_s
    assert schedule.context.state.stall_seconds == slower_s + 1.0
    assert schedule._cost.seconds == slower_s
