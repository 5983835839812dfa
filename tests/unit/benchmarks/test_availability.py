"""Goodput: by hand, and against a simulation in which no interval beats Young's."""

from __future__ import annotations

import math
import random

import pytest
from benchmarking import modules
from hypothesis import given
from hypothesis import strategies as st

from mingpt_ddp.training.saves.save_schedule import young_interval

costs = st.floats(1e-3, 1e3)
mtbfs = st.floats(1e3, 1e8)
factors = st.floats(1.0, 1e3)


@pytest.fixture(scope="module")
def goodput():
    for benchmarks in modules("availability"):
        yield benchmarks.availability.goodput


def simulate(
    interval: float, cost: float, durable: float, restart: float, mtbf: float, failures: int
) -> float:
    """Simulate one attempt after another, snapshot by snapshot."""
    random_times = random.Random(0)
    lasting = total = 0.0
    for _ in range(failures):
        life = random_times.expovariate(1 / mtbf)
        total += life
        start = restart + interval  # of the next snapshot
        while start + durable <= life:
            lasting += interval
            start += cost + interval
    return lasting / total


@given(cost=costs, mtbf=st.floats(1e5, 1e8), factor=st.floats(0.01, 100))
def test_no_interval_is_better_than_the_formula(goodput, cost, mtbf, factor):
    best = young_interval(cost, mtbf)
    assert goodput(best * factor, cost, 0, 0, mtbf) <= 1.002 * goodput(best, cost, 0, 0, mtbf)


@pytest.mark.parametrize(("cost", "durable"), [(20, 20), (2, 30), (100, 100)])
def test_no_interval_is_better_in_a_simulation(cost, durable):
    """From a fifth to five times the interval of the formula, all with the same failures."""
    case = {"cost": cost, "durable": durable, "restart": 60, "mtbf": 2000, "failures": 4000}
    best = max(young_interval(cost, 2000), durable)
    reached = simulate(best, **case)
    grid = [best * 5 ** (i / 20) for i in range(-20, 21)]
    assert (
        max(simulate(interval, **case) for interval in grid if interval >= durable)
        <= 1.01 * reached
    )


def test_goodput_by_hand(goodput):
    """T = 90, C = 10, M = 100; then durable 20 after the stall, and a restart of 30."""
    assert goodput(90, 10, 10, 0, 100) == pytest.approx(0.9 / (math.e - 1))
    assert goodput(90, 10, 30, 30, 100) == pytest.approx(0.9 / (math.e - 1) * math.exp(-0.5))


def test_goodput_without_failures_or_without_time_between_them(goodput):
    assert goodput(90, 10, 20, 30, math.inf) == 0.9
    assert goodput(90, 10, 20, 30, 1e-3) == 0.0


def test_goodput_to_first_order(goodput):
    """A rare failure costs half a period, the time until durable, and the restart."""
    interval, cost, durable, restart, mtbf = 1000, 10, 50, 60, 1e8
    remaining = interval / (interval + cost)
    lost = ((interval + cost) / 2 + durable - cost + restart) / mtbf
    assert 1 - goodput(interval, cost, durable, restart, mtbf) / remaining == pytest.approx(
        lost, rel=1e-5
    )


@pytest.mark.parametrize(
    ("interval", "cost", "durable", "restart", "mtbf"),
    [
        (300, 20, 20, 60, 2000),  # synchronous
        (100, 2, 30, 60, 2000),  # in the background
        (30, 2, 30, 60, 2000),  # one snapshot after another
        (400, 50, 300, 500, 1000),  # failures during most restarts and stalls
        (100, 0, 0, 0, 1000),
    ],
)
def test_goodput_equals_that_of_a_simulation(goodput, interval, cost, durable, restart, mtbf):
    found = simulate(interval, cost, durable, restart, mtbf, failures=40_000)
    assert found == pytest.approx(goodput(interval, cost, durable, restart, mtbf), abs=0.005)


@given(cost=costs, mtbf=mtbfs, factor=factors, delay=st.floats(0, 1e3), restart=st.floats(0, 1e3))
def test_goodput_falls_with_every_cost(goodput, cost, mtbf, factor, delay, restart):
    interval = max(young_interval(cost, mtbf), cost + delay)
    share = goodput(interval, cost, cost + delay, restart, mtbf)
    assert 0 <= share < 1
    share *= 1 + 1e-12  # the rounding of floats
    assert goodput(interval, cost, cost + delay, restart * factor, mtbf) <= share
    assert goodput(interval, cost, cost + delay, restart, mtbf / factor) <= share
    assert goodput(interval, cost * factor, cost * factor + delay, restart, mtbf) <= share


@pytest.mark.parametrize(
    "bad",
    [
        (0, 1, 1, 0, 100),
        (math.inf, 1, 1, 0, 100),
        (10, 1, 12, 0, 100),
        (10, -1, 1, 0, 100),
        (10, 1, 1, 0, 0),
    ],
)
def test_impossible_goodput_is_refused(goodput, bad):
    with pytest.raises(ValueError):
        goodput(*bad)
