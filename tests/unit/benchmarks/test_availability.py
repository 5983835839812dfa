"""The goodput formula agrees with values worked out by hand and with a simulation.

Young's save interval is within 0.2% of the best one.
"""

from __future__ import annotations

import math
import random

import pytest
from benchmarking import modules
from hypothesis import given
from hypothesis import strategies as st

from mingpt_ddp.training.saves.save_schedule import young_interval


@pytest.fixture(scope="module")
def goodput():
    for benchmarks in modules("availability"):
        yield benchmarks.availability.goodput


def simulate(
    interval: float, cost: float, durable: float, restart: float, mtbf: float, failures: int
) -> float:
    """Simulate attempts that each end in a failure. Return the share of the time that was kept."""
    random_times = random.Random(0)
    lasting = total = 0.0
    for _ in range(failures):
        life = random_times.expovariate(1 / mtbf)
        total += life
        start = restart + interval  # when the next snapshot starts
        while start + durable <= life:
            lasting += interval
            start += cost + interval
    return lasting / total


@given(cost=st.floats(1e-3, 1e3), mtbf=st.floats(1e5, 1e8), factor=st.floats(0.01, 100))
def test_no_interval_is_better_than_the_formula(goodput, cost, mtbf, factor):
    best = young_interval(cost, mtbf)
    assert goodput(best * factor, cost, 0, 0, mtbf) <= 1.002 * goodput(best, cost, 0, 0, mtbf)


def test_goodput_by_hand(goodput):
    """The first case saves every 90 s with a stall of 10 s, and fails every 100 s on average.

    In the second case, a snapshot is durable 20 s after the stall, and a restart takes 30 s. The
    third case never fails, and the last one fails all the time.
    """
    assert goodput(90, 10, 10, 0, 100) == pytest.approx(0.9 / (math.e - 1))
    assert goodput(90, 10, 30, 30, 100) == pytest.approx(0.9 / (math.e - 1) * math.exp(-0.5))
    assert goodput(90, 10, 20, 30, math.inf) == 0.9
    assert goodput(90, 10, 20, 30, 1e-3) == 0.0


@pytest.mark.parametrize(
    ("interval", "cost", "durable", "restart", "mtbf"),
    [
        (300, 20, 20, 60, 2000),  # synchronous saves
        (100, 2, 30, 60, 2000),  # saves in the background
        (30, 2, 30, 60, 2000),  # always a save in progress
        (400, 50, 300, 500, 1000),  # failures during most restarts and stalls
        (100, 0, 0, 0, 1000),
    ],
)
def test_goodput_agrees_with_a_simulation(goodput, interval, cost, durable, restart, mtbf):
    found = simulate(interval, cost, durable, restart, mtbf, failures=40_000)
    assert found == pytest.approx(goodput(interval, cost, durable, restart, mtbf), abs=0.005)


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
