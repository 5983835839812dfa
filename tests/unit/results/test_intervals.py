"""Means with 95% intervals by Student's t."""

from __future__ import annotations

import math

import pytest

from mingpt_ddp.results.stats import intervals
from mingpt_ddp.results.stats.intervals import Estimate, estimate

# The 97.5% quantile of Student's t in closed form: tan(0.475 pi) for 1 degree of freedom,
# 2 p sqrt(2 / (1 - 4 p^2)) with p = 0.475 for 2.
T1 = math.tan(0.475 * math.pi)
T2 = 0.95 * math.sqrt(2 / (1 - 0.95**2))


def test_one_value_has_no_interval():
    assert estimate([2.5]) == Estimate(1, 2.5, None, None, None)


def test_two_values():
    """1 and 3: the deviation is sqrt(2), that of the mean 1."""
    found = estimate([1.0, 3.0])
    assert (found.n, found.mean) == (2, 2.0)
    assert found.deviation == pytest.approx(math.sqrt(2))
    assert found.half_width == pytest.approx(T1)
    assert (found.low, found.high) == pytest.approx((2 - T1, 2 + T1))


def test_three_values():
    """1, 2 and 3: the deviation is 1, that of the mean 1 / sqrt(3)."""
    found = estimate([1, 2, 3])
    assert (found.n, found.mean, found.deviation) == (3, 2.0, pytest.approx(1.0))
    assert found.high == pytest.approx(2 + T2 / math.sqrt(3))


def test_many_degrees_of_freedom():
    """Tables of Student's t: 2.228 for 10, 1.960 for infinity."""
    assert intervals.student_t(10) == pytest.approx(2.228, abs=5e-4)
    assert intervals.student_t(1e9) == pytest.approx(1.960, abs=5e-4)


def test_equal_values_have_an_interval_of_no_width():
    assert estimate([2.0, 2.0]) == Estimate(2, 2.0, 0.0, 2.0, 2.0)


def test_large_values_do_not_overflow():
    found = estimate([9e99, -9e99, 0.0])
    assert all(math.isfinite(value) for value in (found.mean, found.deviation, found.high))
