"""Daly's snapshot interval against the paper and numbers by hand; test_availability.py simulates
it.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingpt_ddp.training.save_schedule import best_interval

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
