"""Means with 95% intervals by Student's t."""

from __future__ import annotations

import math

import pytest

from mingpt_ddp.study.results.stats.intervals import Estimate, estimate, student_t

# The 97.5% quantile of Student's t has a closed form: tan(0.475 pi) for 1 degree of freedom, and
# 2 p sqrt(2 / (1 - 4 p^2)) with p = 0.475 for 2. The others are from printed tables.
T1 = math.tan(0.475 * math.pi)
T2 = 0.95 * math.sqrt(2 / (1 - 0.95**2))


@pytest.mark.parametrize(
    ("values", "mean", "deviation", "half_width"),
    [
        ([1.0, 3.0], 2.0, math.sqrt(2), T1),  # the standard error of the mean is 1
        ([1, 2, 3], 2.0, 1.0, T2 / math.sqrt(3)),
        ([2.0, 2.0], 2.0, 0.0, 0.0),
        ([9e99, -9e99, 0.0], 0.0, 9e99, T2 * 9e99 / math.sqrt(3)),
    ],
)
def test_an_estimate(values, mean, deviation, half_width):
    found = estimate(values)
    assert found.n == len(values)
    assert (found.mean, found.deviation, found.half_width) == pytest.approx(
        (mean, deviation, half_width)
    )
    assert (found.low, found.high) == pytest.approx((mean - half_width, mean + half_width))


def test_one_value_has_no_interval():
    assert estimate([2.5]) == Estimate(1, 2.5, None, None, None)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, T1), (2, T2), (3, 3.1824), (10, 2.2281), (30, 2.0423), (1e9, 1.95996)],
)
def test_the_quantile(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, abs=5e-5)
