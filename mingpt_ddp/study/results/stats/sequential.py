"""A test of paired differences that stays valid if you look at its result after every pair.

A pair holds the results of two settings with the same seed, where a setting is a configuration
without its seed. The test measures the evidence for a difference as an e-value. If the two settings
do not differ, the chance that their e-value ever reaches 1 / L is at most L. Here the e-value is a
Bayes factor of the t-test. Its prior on the effect size (the mean difference in standard deviations
of the differences) is normal, with variance 1. Source: Pérez-Ortiz, Lardy, de Heide, Grünwald,
*E-statistics, group invariance and anytime-valid testing*, 2022.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mingpt_ddp.study.results.stats.significance import LEVEL, ROUNDING


class Decision(str, Enum):
    """The result of a sequential test that compares a setting with the reference."""

    DIFFERENT = "different"
    NEGLIGIBLE = "smaller"  # the difference is smaller than the smallest relevant difference
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Pair:
    """The costs of two settings with the same seed. Lower is better."""

    reference: float
    other: float

    @property
    def difference(self) -> float:
        return self.other - self.reference


@dataclass(frozen=True)
class Evidence:
    """The result of a sequential test after some pairs."""

    decision: Decision
    difference: float  # mean of other - reference
    # Ends of the confidence interval of the mean difference, corrected for all comparisons.
    low: float
    high: float
    p: float  # the number of comparisons divided by the e-value, at most 1


@dataclass(frozen=True)
class SequentialTest:
    """The rule that decides a comparison. It is fixed before the first pair."""

    # Number of settings compared with the reference. The chance that any of these comparisons is
    # wrong is at most LEVEL.
    n_comparisons: int
    # Smallest difference that matters to the user. None if every difference matters.
    smallest_relevant: float | None = None

    @property
    def log_threshold(self) -> float:
        """Logarithm of the e-value from which the settings count as different."""
        return math.log(self.n_comparisons / LEVEL)

    @property
    def min_pairs(self) -> int:
        """The smallest number of pairs that can show a difference, no matter how large it is.

        The e-value of n pairs is at most (1 + n) ** ((n - 1) / 2).
        """
        n = 2
        while (n - 1) / 2 * math.log1p(n) < self.log_threshold:
            n += 1
        return n

    def evidence(self, pairs: Sequence[Pair]) -> Evidence | None:
        """Compute the evidence of these pairs.

        Returns:
            None if there are fewer than two pairs, or if their differences vary only by rounding.
        """
        n = len(pairs)
        if n < 2:
            return None
        differences = [pair.difference for pair in pairs]
        mean = statistics.fmean(differences)
        deviation = statistics.stdev(differences)
        rounding = ROUNDING * max(max(abs(each.reference), abs(each.other)) for each in pairs)
        if deviation <= rounding:
            return None
        log_e = _log_e(n, n * (mean / deviation) ** 2)
        half_width = self._largest_undecided_t(n) * deviation / math.sqrt(n)
        limit = self.smallest_relevant
        is_negligible = limit is not None and abs(mean) + half_width < limit
        decision = Decision.NEGLIGIBLE if is_negligible else Decision.UNDECIDED
        if log_e >= self.log_threshold:
            decision = Decision.DIFFERENT
        p = min(1.0, self.n_comparisons * math.exp(-max(log_e, 0.0)))
        return Evidence(decision, mean, mean - half_width, mean + half_width, p)

    def decided_after(self, pairs: Sequence[Pair]) -> int | None:
        """Return the number of pairs after which the test first decides. None if it never does.

        Pairs after the decision do not count. The order of the pairs is fixed before the first one.
        """
        for n in range(2, len(pairs) + 1):
            evidence = self.evidence(pairs[:n])
            if evidence is not None and evidence.decision is not Decision.UNDECIDED:
                return n
        return None

    def _largest_undecided_t(self, n: int) -> float:
        """Return the t statistic of n pairs at which the e-value reaches the threshold.

        Return infinity if the e-value of n pairs stays below the threshold for every t.
        """
        ratio = math.exp(2 / n * (self.log_threshold + math.log1p(n) / 2))
        if ratio >= 1 + n:
            return math.inf
        return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / (1 + n)))


def _log_e(n: int, t_squared: float) -> float:
    """Return the logarithm of the e-value of n pairs, from the square of their paired t."""
    degrees = n - 1  # degrees of freedom
    log_ratio = math.log1p(t_squared / degrees) - math.log1p(t_squared / (degrees * (1 + n)))
    return (n * log_ratio - math.log1p(n)) / 2
