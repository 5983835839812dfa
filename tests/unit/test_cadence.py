"""When to save: Daly's interval and the goodput, against the paper, numbers by hand and a literal simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingpt_ddp.cadence import best_interval, goodput

MINUTE, HOUR = 60.0, 3600.0
costs = st.floats(1e-3, 1e3)
mtbfs = st.floats(1e3, 1e8)
factors = st.floats(1.0, 1e3)


def simulate(interval: float, cost: float, durable: float, restart: float, mtbf: float, failures: int) -> float:
    """One life after another, snapshot by snapshot."""
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


# The interval.


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, "117"), (6 * HOUR, "57"), (15 * MINUTE, "9.1")])
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
        (2, 100, 60, 60),  # the background writing takes longer than the formula's 18.7
        (2, math.inf, 0, math.inf),
        (200, 100, 0, 100),  # a snapshot takes as long as two lives
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
    assert best_interval(cost * factor, mtbf * factor) == pytest.approx(factor * best_interval(cost, mtbf))


@given(cost=costs, mtbf=mtbfs, factor=st.floats(0.01, 100))
def test_no_interval_is_better_than_the_formula(cost, mtbf, factor):
    best = best_interval(cost, mtbf)
    assert goodput(best * factor, cost, 0, 0, mtbf) <= 1.002 * goodput(best, cost, 0, 0, mtbf)


@pytest.mark.parametrize(("cost", "durable"), [(20, 20), (2, 30), (100, 100)])
def test_no_interval_is_better_in_a_simulation(cost, durable):
    """From a fifth to five times the formula's interval, all against the same failures."""
    case = {"cost": cost, "durable": durable, "restart": 60, "mtbf": 2000, "failures": 4000}
    best = best_interval(cost, 2000, durable)
    reached = simulate(best, **case)
    grid = [best * 5 ** (i / 20) for i in range(-20, 21)]
    assert max(simulate(interval, **case) for interval in grid if interval >= durable) <= 1.01 * reached


@pytest.mark.parametrize("bad", [(-1, 100), (1, 0), (1, -1), (math.nan, 100), (1, math.nan), (1, 100, -1)])
def test_impossible_times_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        best_interval(*bad)


# The goodput.


def test_goodput_by_hand():
    """T = 90, C = 10, M = 100: 0.9 / (e - 1). Durable 20 after the stall, a restart of 30: e ** -0.5 of it."""
    assert goodput(90, 10, 10, 0, 100) == pytest.approx(0.9 / (math.e - 1))
    assert goodput(90, 10, 30, 30, 100) == pytest.approx(0.9 / (math.e - 1) * math.exp(-0.5))


def test_goodput_without_failures_or_without_time_between_them():
    assert goodput(90, 10, 20, 30, math.inf) == 0.9
    assert goodput(90, 10, 20, 30, 1e-3) == 0.0


def test_goodput_to_first_order():
    """Of what the stalls leave, rare failures take half a period each, the time to be durable after it, the restart."""
    interval, cost, durable, restart, mtbf = 1000, 10, 50, 60, 1e8
    left = interval / (interval + cost)
    lost = ((interval + cost) / 2 + durable - cost + restart) / mtbf
    assert 1 - goodput(interval, cost, durable, restart, mtbf) / left == pytest.approx(lost, rel=1e-5)


@pytest.mark.parametrize(
    ("interval", "cost", "durable", "restart", "mtbf"),
    [
        (300, 20, 20, 60, 2000),  # synchronous
        (100, 2, 30, 60, 2000),  # in the background
        (30, 2, 30, 60, 2000),  # one snapshot after another
        (400, 50, 300, 500, 1000),  # failures in most lives' restarts and stalls
        (100, 0, 0, 0, 1000),
    ],
)
def test_goodput_is_what_a_simulation_finds(interval, cost, durable, restart, mtbf):
    found = simulate(interval, cost, durable, restart, mtbf, failures=40_000)
    assert found == pytest.approx(goodput(interval, cost, durable, restart, mtbf), abs=0.005)


@given(cost=costs, mtbf=mtbfs, factor=factors, delay=st.floats(0, 1e3), restart=st.floats(0, 1e3))
def test_whatever_costs_more_leaves_less(cost, mtbf, factor, delay, restart):
    interval = best_interval(cost, mtbf, least_s=cost + delay)
    share = goodput(interval, cost, cost + delay, restart, mtbf)
    assert 0 <= share < 1
    share *= 1 + 1e-12  # the rounding of floats
    assert goodput(interval, cost, cost + delay, restart * factor, mtbf) <= share
    assert goodput(interval, cost, cost + delay, restart, mtbf / factor) <= share
    assert goodput(interval, cost * factor, cost * factor + delay, restart, mtbf) <= share


@pytest.mark.parametrize(
    "bad",
    [(0, 1, 1, 0, 100), (math.inf, 1, 1, 0, 100), (10, 1, 12, 0, 100), (10, -1, 1, 0, 100), (10, 1, 1, 0, 0)],
)
def test_impossible_goodput_is_refused(bad):
    with pytest.raises(ValueError):
        goodput(*bad)
