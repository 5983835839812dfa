"""The number of steps of a run: its limits, and how trainer.max_minutes derives it from timing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from multiprocess.ranks import configure

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics import meters
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.optim.lr_schedule import get_lr
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.training.length import RunLength, StepTimer, known_length
from mingpt_ddp.training.train_state import TrainState

MINUTE = ["trainer.max_epochs=null", "trainer.max_minutes=1", "optimizer.warmup_steps=30"]
CONSTANT = [*MINUTE, "optimizer.schedule=constant"]


def config_of(*overrides: str) -> Config:
    return from_mapping(configure("model=gpt_nano", "trainer.device=cpu", *overrides))


class Clock:
    """A run whose steps take a given time."""

    def __init__(self, monkeypatch: Any, *overrides: str, state: TrainState | None = None) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(meters.time, "perf_counter", lambda: self.seconds)
        runtime = Runtime(config_of(), DistEnv())
        monkeypatch.setattr(runtime, "now", lambda: self.seconds)
        self.meter = Meter(runtime, 1, "tokens")
        self.state = state or TrainState()
        self.length = RunLength(config_of(*overrides), 10, self.state)
        self.timer = StepTimer(self.length, self.meter)

    def train(self, until: int, step_s: float) -> None:
        """Train up to this step, or to the end of the run."""
        while self.state.step < min(until, self.length.steps):
            step = self.state.step + 1
            self.seconds += step_s
            if steps := self.timer.record_step(step):
                self.length.fix(steps, step)
            self.state.step = step


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (["trainer.max_epochs=3", "trainer.max_steps=null"], 30),
        (["trainer.max_epochs=null", "trainer.max_steps=7"], 7),
        (["trainer.max_epochs=3", "trainer.max_steps=7"], 7),
        (["trainer.max_epochs=3", "trainer.max_steps=70"], 30),
        (["trainer.max_epochs=null", "trainer.max_minutes=1"], 600),
        (["trainer.max_epochs=3", "trainer.max_minutes=1"], 30),
    ],
)
def test_a_run_ends_at_the_smallest_of_its_limits(limits, steps):
    length = RunLength(config_of(*limits), 10, TrainState(step_seconds=0.1))
    assert length.steps == length.known_steps == steps


@pytest.mark.parametrize(
    ("overrides", "fixed_at"),
    [
        (MINUTE, 60),  # a tenth of 600 steps
        (CONSTANT, 60),
        ([*MINUTE, "optimizer.warmup_steps=0"], 60),
        ([*MINUTE, "optimizer.warmup_steps=90"], 90),
        ([*MINUTE, "optimizer.warmup_steps=90", "optimizer.schedule_steps=500"], 60),
        ([*MINUTE, "trainer.max_minutes=0.1"], 30),  # the length of the warm-up
        ([*CONSTANT, "trainer.max_minutes=0.1"], 12),  # ten timed steps
    ],
)
def test_the_number_is_fixed_after_a_tenth_of_the_minutes_and_the_warm_up(
    monkeypatch, overrides, fixed_at
):
    clock = Clock(monkeypatch, *overrides)
    clock.train(fixed_at - 4, step_s=0.1)
    assert (clock.length.known_steps, clock.length.is_fixed) == (None, False)
    clock.train(fixed_at + 4, step_s=0.1)  # a few steps more, because they are timed in blocks
    minutes = clock.length.trainer.max_minutes
    assert clock.length.known_steps == pytest.approx(600 * minutes, abs=1)
    before = clock.length.steps
    clock.train(before, step_s=0.7)
    assert clock.state.step == clock.length.steps == before, "from now on the clock decides nothing"


def test_slow_steps_use_up_time_but_do_not_set_the_pace(monkeypatch):
    """The machine is busy for 3 of the first 6 seconds. Then 57 seconds are left for fast steps."""
    clock = Clock(monkeypatch, *CONSTANT)
    clock.train(22, step_s=0.05)
    clock.train(24, step_s=1.0)
    clock.train(10_000, step_s=0.05)
    assert clock.length.steps == pytest.approx(24 + 57 / 0.05, rel=0.01)
    assert clock.length.minutes == pytest.approx(1, rel=0.01)
    described = f"trained 0.999 minutes of trainer.max_minutes=1, in {clock.length.steps} steps"
    assert clock.length.describe_time() == described


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_decays_from_the_step_that_fixes_the_number(monkeypatch, schedule):
    """It decays to the last step, as if both steps were configured. A resume knows the step."""
    overrides = [*MINUTE, f"optimizer.schedule={schedule}"]
    clock = Clock(monkeypatch, *overrides)
    config = config_of(*overrides)
    rates = {}
    for step in range(1, 601):
        clock.train(step, step_s=0.1)
        resumed = RunLength(config, 10, clock.state)
        for length in (clock.length, resumed):
            given = length.with_decay_from(length.optimizer)
            rates.setdefault(step, set()).add(get_lr(step, given, length.steps))
    paced_at = clock.state.paced_at
    assert 30 < 60 <= paced_at < 70
    typed = replace(clock.length.optimizer, decay_from=paced_at)
    assert rates == {step: {get_lr(step, typed, clock.length.steps)} for step in rates}
    assert rates[30] == rates[paced_at] == {typed.lr}
    assert min(rates[600]) == pytest.approx(typed.lr * typed.min_lr_ratio, rel=0.2)


def test_the_first_steps_of_a_start_and_pauses_are_not_timed(monkeypatch):
    clock = Clock(monkeypatch, *CONSTANT)
    clock.train(2, step_s=5.0)
    clock.train(10, step_s=0.1)
    with clock.meter.paused():
        clock.seconds += 50.0
        with clock.meter.paused():
            clock.seconds += 50.0
    clock.train(20, step_s=0.1)
    assert clock.state.timed_steps == 18
    assert clock.state.timed_seconds == pytest.approx(1.8)
    clock.train(70, step_s=0.1)
    assert clock.length.steps == pytest.approx(600, abs=1)


def test_training_time_before_a_kill_counts(monkeypatch):
    """The second attempt runs at half the pace until the number is fixed. It is then kept."""
    first = Clock(monkeypatch, *CONSTANT)
    first.train(42, step_s=0.1)
    assert not first.length.is_fixed
    second = Clock(monkeypatch, *CONSTANT, state=first.state)
    second.train(56, step_s=0.2)
    assert second.length.is_fixed
    paced_at, taken_s = second.state.paced_at, second.length.minutes * 60
    assert taken_s >= 6
    assert second.length.steps == pytest.approx(paced_at + (60 - 6) / 0.1, rel=0.02)
    third = Clock(monkeypatch, *CONSTANT, state=second.state)
    assert third.length.steps == second.length.steps
    other = Clock(monkeypatch, *CONSTANT, "trainer.max_minutes=2", state=second.state)
    assert other.length.steps == 2 * second.length.steps


def test_the_timing_begins_anew_after_a_rollback(monkeypatch):
    clock = Clock(monkeypatch, *CONSTANT)
    clock.train(10, step_s=0.1)
    clock.timer.restart()
    clock.train(12, step_s=9.0)
    clock.train(20, step_s=0.1)
    assert clock.state.timed_seconds == pytest.approx(1.6)


def test_minutes_that_end_before_the_number_is_fixed_end_the_run(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    clock = Clock(monkeypatch, *MINUTE)
    clock.train(100, step_s=6.0)
    assert clock.state.step == clock.length.known_steps == 10
    assert caplog.messages == [
        "trainer.max_minutes=1 is over: step 10 is the last; the warm-up takes 30 of 10 steps; "
        "lower optimizer.warmup_steps to reach optimizer.lr"
    ]


def test_if_minutes_are_raised_later_the_number_follows_from_the_timed_steps(monkeypatch):
    clock = Clock(monkeypatch, *MINUTE, "trainer.max_minutes=1e-5")
    clock.train(100, step_s=6.0)
    assert clock.state.step == clock.length.known_steps == 3
    assert RunLength(config_of(*MINUTE, "trainer.max_minutes=1e-5"), 10, clock.state).steps == 3
    assert RunLength(config_of(*MINUTE, "trainer.max_minutes=0.5"), 10, clock.state).steps > 1e6
    more = Clock(monkeypatch, *MINUTE, "trainer.max_minutes=5", state=clock.state)
    more.train(100, step_s=6.0)
    assert more.length.known_steps == 50


def test_another_limit_that_is_smaller_is_named(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mingpt_ddp")
    clock = Clock(monkeypatch, *CONSTANT, "trainer.max_steps=150")
    clock.train(200, step_s=0.0625)
    assert clock.state.step == 150
    assert caplog.messages == [
        "trainer.max_minutes=1 allows 960 steps: a step takes 62.5 ms",
        "trainer.max_steps=150 ends the run at step 150, before trainer.max_minutes=1.0; set "
        "trainer.max_steps=null to train on",
    ]


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        (TrainState(step=70, timed_steps=50, timed_seconds=5.0), 600),
        (TrainState(step=70, timed_steps=50, timed_seconds=5.0, block_paces=[0.1, 0.2, 9]), 335),
        (TrainState(step=40, wall_seconds=8.0), 300),  # from a version that did not time steps
        (TrainState(), None),
        (TrainState(step=29, wall_seconds=8.0), None),
        (TrainState(step=29, timed_steps=20, timed_seconds=60.0), 29),
    ],
)
def test_a_snapshot_from_after_the_warmup_has_the_time_of_its_steps(state, steps):
    length = RunLength(config_of(*MINUTE), 10, state)
    assert (length.known_steps or length.steps_from_pace(state.step)) == steps


def test_a_training_loop_that_does_not_time_steps_refuses_max_minutes():
    with pytest.raises(
        ConfigError, match=r"trainer.max_minutes works only if the steps are timed; set"
    ):
        known_length(config_of(*MINUTE), 10)
    assert known_length(config_of(*MINUTE), 10, step_seconds=0.1).steps == 600
    assert known_length(config_of("trainer.max_epochs=3"), 10).steps == 30
