"""The t-tests of two settings agree with values from integrating Student's density."""

from __future__ import annotations

import pytest

from mingpt_ddp.study.results.stats.significance import (
    are_paired,
    difference,
    holm,
    why_incomparable,
)


def values(*numbers: float, first: int = 1) -> dict[str, float]:
    return {str(seed): number for seed, number in enumerate(numbers, first)}


TWO_ONLY_IN_ONE = {"3": 3.3, "2": 2.2, "1": 1.1, "5": -100.0}


@pytest.mark.parametrize(
    ("one", "other", "test", "seeds", "left_out", "numbers"),
    [
        # Last come the difference, half the width of its interval, and p. In the first row, the
        # mean is 0.2 and the standard deviation is 0.1.
        (
            values(1, 2, 3),
            values(1.1, 2.2, 3.3),
            "paired t",
            (3, 3),
            0,
            (0.2, -0.04841377, 0.44841377, 0.0741799),
        ),
        (
            values(1, 2, 3, 100),
            TWO_ONLY_IN_ONE,
            "paired t",
            (3, 3),
            2,
            (0.2, -0.04841377, 0.44841377, 0.0741799),
        ),
        (
            values(5, 5, 5, 5, 5),
            values(4, 3, 1, 1.5, 2.5),
            "paired t",
            (5, 5),
            0,
            (-2.6, -4.0822161, -1.1177839, 0.00821823),
        ),
        (
            values(1, 1.1, 1.2, 1.3),
            values(2, 2.4, 2.8, first=10),
            "Welch",
            (4, 3),
            0,
            (1.25, 0.34186436, 2.15813564, 0.02535973),
        ),
        (
            values(1.5, 1.6),
            values(1.0, 1.9),
            "Welch",
            (2, 2),
            0,
            (-0.1, -5.5355581, 5.3355581, 0.86094200),
        ),
    ],
)
def test_a_difference(one, other, test, seeds, left_out, numbers):
    found = difference(one, other)
    assert (found.test, found.seeds, found.left_out) == (test, seeds, left_out)
    assert (found.difference, found.low, found.high, found.p) == pytest.approx(numbers, rel=1e-5)
    turned, other_way = found.reversed, difference(other, one)
    assert turned.seeds == other_way.seeds
    assert (turned.difference, turned.low, turned.high) == pytest.approx(
        (other_way.difference, other_way.low, other_way.high)
    )


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
def test_seeds_are_paired_if_both_settings_have_most_of_them(one, other, expected):
    sides = [{str(seed): 1.0 for seed in seeds} for seeds in (one, other)]
    assert are_paired(*sides) is are_paired(*sides[::-1]) is expected


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (values(1.0), values(2.0, 2.1), "one seed"),
        (values(1.0, 1.0), values(2.0, 2.0), "all seeds of a setting have the same result"),
        (values(1.0, 2.0, 3.0), values(2.0, 3.0, 4.0), "each seed has the same difference, 1,"),
        (values(1.0, 2.0, 3.0), values(1.0, 2.0, 3.0), "each seed has the same result in both"),
        (values(1.0, 1.0), values(2.0, 2.1), None),
    ],
)
def test_without_variation_between_seeds_there_is_no_test(one, other, reason):
    why = why_incomparable(one, other)
    assert (why is None) if reason is None else (reason in why)


@pytest.mark.parametrize(
    ("ps", "tests", "expected"),
    [
        # 0.01 * 4, then 0.02 * 3 and 0.03 * 2. 0.04 rises to 0.06, since p may not fall.
        ([0.04, 0.01, 0.03, 0.02], 4, [0.06, 0.04, 0.06, 0.06]),
        ([0.002, 0.001], 10, [0.018, 0.01]),  # counts tests that were not made
        ([0.6, 0.9], 2, [1.0, 1.0]),
        ([], 0, []),
    ],
)
def test_holm(ps, tests, expected):
    assert holm(ps, tests) == pytest.approx(expected)
