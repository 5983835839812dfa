"""The t-tests of two settings, against formulas and tables worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy import stats

from mingpt_ddp.results.stats.significance import (
    are_paired,
    difference,
    holm,
    why_incomparable,
)

pytestmark = pytest.mark.core


def values(*numbers: float, first: int = 1) -> dict[str, float]:
    return {str(seed): number for seed, number in enumerate(numbers, first)}


def test_pairs_by_hand():
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t = 4.3027 with 2 degrees of freedom."""
    found = difference(values(1.0, 2.0, 3.0), values(1.1, 2.2, 3.3))
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.test == "paired t"
    assert found.seeds == (3, 3)
    assert found.difference == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-6)
    t = 0.2 / (0.1 / math.sqrt(3))
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2)), "Student's t of 2 degrees"


def test_welch_by_hand():
    one = values(1.0, 1.1, 1.2, 1.3)
    other = values(2.0, 2.4, 2.8, first=10)
    found = difference(one, other)
    squares = statistics.variance(one.values()) / 4, statistics.variance(other.values()) / 3
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / 3 + squares[1] ** 2 / 2)
    half = stats.t.isf(0.025, freedom) * math.sqrt(sum(squares))
    assert found.test == "Welch"
    assert found.seeds == (4, 3)
    assert found.difference == pytest.approx(2.4 - 1.15)
    assert (found.low, found.high) == pytest.approx((1.25 - half, 1.25 + half))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (range(3), range(3), True),
        (range(2), range(2), False),
        (range(5), range(2, 7), True),
        (range(6), range(3, 9), True),
        (range(7), range(4, 11), False),
        (range(3), range(10), False),
        (range(3), range(3, 6), False),
    ],
)
def test_seeds_are_paired_where_most_are_in_both(one, other, expected):
    sides = [{str(seed): 1.0 for seed in seeds} for seeds in (one, other)]
    assert are_paired(*sides) is expected
    assert are_paired(*sides[::-1]) is expected


def test_seeds_that_are_not_in_both_are_not_paired():
    one = {"1": 1.0, "2": 2.0, "3": 3.0, "4": 100.0}
    other = {"3": 3.3, "2": 2.2, "1": 1.1, "5": -100.0}
    found = difference(one, other)
    assert (found.difference, found.seeds) == (pytest.approx(0.2), (3, 3))
    assert found.left_out == 2


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (values(1.0), values(2.0, 2.1), "one seed"),
        (values(1.0, 1.0), values(2.0, 2.0), "seeds of each have all the same result"),
        (values(1.0, 2.0, 3.0), values(2.0, 3.0, 4.0), "each seed has the same difference, 1,"),
        (values(1.0, 2.0, 3.0), values(1.0, 2.0, 3.0), "each seed has the same result in both"),
        (values(1.0, 1.0), values(2.0, 2.1), None),
    ],
)
def test_without_chance_there_is_no_test(one, other, reason):
    why = why_incomparable(one, other)
    assert (why is None) if reason is None else (reason in why)


def test_holm_by_hand():
    """0.01 * 4; 0.02 * 3; 0.03 * 2 = 0.06; then 0.04, which is not below the one before."""
    assert holm([0.04, 0.01, 0.03, 0.02], 4) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9], 2) == [1.0, 1.0]
    assert holm([], 0) == []


def test_holm_with_tests_that_were_not_made():
    """0.001 * 10; 0.002 * 9."""
    assert holm([0.002, 0.001], 10) == pytest.approx([0.018, 0.01])
