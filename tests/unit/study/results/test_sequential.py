"""The sequential test behind sweep.until=decided."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import integrate, stats

from mingpt_ddp.study.results.stats.sequential import Decision, Pair, SequentialTest

ONE = SequentialTest(1)


def pairs(*differences, reference=1.0):
    return [Pair(reference, reference + difference) for difference in differences]


@pytest.mark.parametrize("differences", [(0.3, -0.1, 0.2), (1.0, 1.1, 0.9, 1.3, 1.2)])
def test_p_is_the_bayes_factor_of_a_normal_prior_on_the_effect(differences):
    """The t-statistic has a noncentral t distribution. Its mean over the prior is integrated."""
    n = len(differences)
    t = statistics.fmean(differences) / statistics.stdev(differences) * math.sqrt(n)

    def weighted(effect):
        return stats.nct.pdf(t, n - 1, math.sqrt(n) * effect) * stats.norm.pdf(effect)

    factor = integrate.quad(weighted, -9, 9)[0] / stats.t.pdf(t, n - 1)
    evidence = ONE.evidence(pairs(*differences))
    assert evidence.p == pytest.approx(min(1, 1 / factor), rel=1e-4)
    assert evidence.difference == pytest.approx(statistics.fmean(differences))


@pytest.mark.parametrize(("comparisons", "least"), [(1, 5), (3, 6), (10, 7)])
def test_too_few_pairs_decide_nothing_however_large_the_difference(comparisons, least):
    test = SequentialTest(comparisons)
    assert test.min_pairs == least
    differences = [1e9 + i % 2 for i in range(least)]
    assert test.evidence(pairs(*differences)).decision is Decision.DIFFERENT
    fewer = test.evidence(pairs(*differences[:-1]))
    assert fewer.decision is Decision.UNDECIDED and fewer.high == math.inf


@pytest.mark.parametrize("test", [ONE, SequentialTest(4)])
def test_the_interval_holds_the_differences_that_are_not_rejected(test):
    draw = random.Random(3)
    differences = [draw.gauss(0.2, 1) for _ in range(9)]
    evidence = test.evidence(pairs(*differences))
    for end, inside in ((evidence.low, 1e-6), (evidence.high, -1e-6)):
        for shift, expected in ((inside, "UNDECIDED"), (-inside, "DIFFERENT")):
            moved = [each - end - shift for each in differences]
            assert test.evidence(pairs(*moved)).decision is Decision[expected]


def test_without_a_difference_at_most_5_percent_are_decided():
    draw = random.Random(0)
    samples = [pairs(*(draw.gauss(0, 1) for _ in range(12))) for _ in range(300)]
    assert sum(ONE.decided_after(each) is not None for each in samples) <= 0.05 * len(samples)


def test_a_decision_stands_although_later_pairs_disagree():
    decisive = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]
    n = ONE.decided_after(pairs(*decisive))
    assert n is not None and ONE.evidence(pairs(*decisive[:n])).decision is Decision.DIFFERENT
    longer = pairs(*decisive, *([-1.0] * 6))
    assert ONE.evidence(longer).decision is Decision.UNDECIDED
    assert ONE.decided_after(longer) == n


def test_a_difference_too_small_to_matter_is_decided():
    small = pairs(0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.005)
    assert ONE.evidence(small).decision is Decision.UNDECIDED
    assert SequentialTest(1, smallest_relevant=0.1).evidence(small).decision is Decision.NEGLIGIBLE
    assert SequentialTest(1, smallest_relevant=0.001).evidence(small).decision is Decision.UNDECIDED


@pytest.mark.parametrize("differences", [(0.0,) * 8, (0.1,) * 8, (0.1 + 1e-15, 0.1) * 4, (1.0,)])
def test_rounding_and_a_single_pair_decide_nothing(differences):
    test = SequentialTest(1, smallest_relevant=10.0)
    assert test.evidence(pairs(*differences)) is None
    assert test.decided_after(pairs(*differences)) is None
