"""A test of paired differences that may be looked at after every pair.

Its evidence against "no difference" is an e-value: a number whose chance of ever reaching 1 / L is
at most L if there is no difference, however often one looks. It is the Bayes factor of the t-test
with a normal prior, of variance 1, on the difference in standard deviations: Pérez-Ortiz, Lardy,
de Heide, Grünwald, *E-statistics, group invariance and anytime-valid testing*, 2022.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mingpt_ddp.study.results.stats.significance import LEVEL, ROUNDING


class Decision(str, Enum):
    """What a sequential test has decided about another setting and its reference."""

    DIFFERENT = "different"
    SMALLER = "smaller"  # the difference is smaller than the user cares about
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
    """What some pairs say."""

    decision: Decision
    difference: float  # the mean of other - reference
    low: float  # lower end of the interval of differences that are not rejected
    high: float
    p: float  # 1 / e times the number of comparisons, at most 1


@dataclass(frozen=True)
class SequentialTest:
    """A rule that is fixed before the first pair."""

    comparisons: int  # all of them together are wrong with a chance of 1 - CONFIDENCE at most
    care: float | None = None  # a smaller difference does not matter; None if each one does

    @property
    def log_threshold(self) -> float:
        """The logarithm of the e-value that decides."""
        return math.log(self.comparisons / LEVEL)

    @property
    def least_pairs(self) -> int:
        """The number of pairs without which no difference can be decided, however large.

        With n pairs, e is at most (1 + n) ** ((n - 1) / 2).
        """
        n = 2
        while (n - 1) / 2 * math.log1p(n) < self.log_threshold:
            n += 1
        return n

    def evidence(self, pairs: Sequence[Pair]) -> Evidence | None:
        """Return what the pairs say. None if they vary by rounding alone, or if there is one."""
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
        half = self._widest_t(n) * deviation / math.sqrt(n)
        is_small = self.care is not None and abs(mean) + half < self.care
        decision = Decision.SMALLER if is_small else Decision.UNDECIDED
        if log_e >= self.log_threshold:
            decision = Decision.DIFFERENT
        p = min(1.0, self.comparisons * math.exp(-max(log_e, 0.0)))
        return Evidence(decision, mean, mean - half, mean + half, p)

    def decided_after(self, pairs: Sequence[Pair]) -> int | None:
        """Return the number of pairs after which the test decides first. None if it does not.

        Later pairs do not count: the order of the pairs is fixed before the first one.
        """
        for n in range(2, len(pairs) + 1):
            evidence = self.evidence(pairs[:n])
            if evidence is not None and evidence.decision is not Decision.UNDECIDED:
                return n
        return None

    def _widest_t(self, n: int) -> float:
        """Return the largest t of n pairs that does not decide. Infinite if none does."""
        ratio = math.exp(2 / n * (self.log_threshold + math.log1p(n) / 2))
        if ratio >= 1 + n:
            return math.inf
        return math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / (1 + n)))


def _log_e(n: int, t_squared: float) -> float:
    """Return the logarithm of the e-value of n pairs, from the square of their paired t."""
    freedom = n - 1
    fits = math.log1p(t_squared / freedom) - math.log1p(t_squared / (freedom * (1 + n)))
    return (n * fits - math.log1p(n)) / 2
