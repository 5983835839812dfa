"""Test whether the results of two settings differ by more than the chance of their seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mingpt_ddp.study.results.stats.intervals import CONFIDENCE

# The chance with which two settings may be called different although they are not.
LEVEL = 1 - CONFIDENCE
MIN_PAIRS = 3
PAIRED = "paired t"
SEQUENTIAL = "sequential"
# A spread below this share of the largest value is rounding. It says nothing about chance.
ROUNDING = 1e-12
Values = Mapping[str, float]  # the values of a setting, by seed


@dataclass(frozen=True)
class Difference:
    """How much larger the mean of one setting is than the mean of another, over tested seeds."""

    difference: float
    low: float  # lower end of the 95% interval
    high: float
    p: float  # two-sided: how often chance alone makes a difference as large
    test: str  # PAIRED, SEQUENTIAL, or Welch
    seeds: tuple[int, int]  # number of tested seeds of each setting
    left_out: int  # number of seeds without a pair, which a paired test leaves out

    @property
    def reversed(self) -> "Difference":
        """The same difference with the two settings exchanged."""
        return replace(
            self,
            difference=-self.difference,
            low=-self.high,
            high=-self.low,
            seeds=self.seeds[::-1],
        )


def are_paired(one: Values, other: Values) -> bool:
    """Return whether to compare seed by seed: where most seeds are those of both settings.

    Runs of one seed begin with the same weights and read the same batches, so that their difference
    varies less than they do. At least MIN_PAIRS: the interval of two pairs is wider than that of
    two pairs of runs taken as independent, 12.7 standard errors instead of 4.3 or a little more.
    The values take no part in the choice, which would spoil the level of the test.
    """
    pairs = len({*one} & {*other})
    return pairs >= MIN_PAIRS and 2 * pairs >= max(len(one), len(other))


def why_incomparable(one: Values, other: Values) -> str | None:
    """Return the reason if nothing can be said about the difference, else None."""
    if min(len(one), len(other)) < 2:
        return "one seed says nothing about chance"
    samples = [*_samples(one, other)]
    is_paired = are_paired(one, other)
    if is_paired:
        samples = [_differences(*samples)]
    rounding = ROUNDING * max(abs(value) for value in (*one.values(), *other.values()))
    if any(statistics.stdev(sample) > rounding for sample in samples):
        return None
    if not is_paired:
        return "the seeds of each have all the same result, which says nothing about chance"
    gap = abs(statistics.fmean(samples[0]))
    if gap <= rounding:
        return "each seed has the same result in both"
    return f"each seed has the same difference, {gap:.4g}, which says nothing about chance"


def difference(one: Values, other: Values) -> Difference:
    """Return the difference of the means over the tested seeds, other - one, with its 95% interval.

    The t-test of Student, *The probable error of a mean*, 1908, on the differences where
    `are_paired`; else that of Welch, *The generalization of "Student's" problem when several
    different population variances are involved*, 1947. Both assume that the results of many seeds
    are normally distributed.

    Args:
        one, other: Results by seed, for which `why_incomparable` returns None.
    """
    from scipy import stats

    ours, theirs = _samples(one, other)
    if are_paired(one, other):
        name, test = PAIRED, stats.ttest_rel(theirs, ours)
        mean = statistics.fmean(_differences(ours, theirs))
    else:
        name, test = "Welch", stats.ttest_ind(theirs, ours, equal_var=False)
        mean = statistics.fmean(theirs) - statistics.fmean(ours)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    seeds = len(ours), len(theirs)
    left_out = len(one) + len(other) - sum(seeds)
    return Difference(mean, low, high, float(test.pvalue), name, seeds, left_out)


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [their - our for our, their in zip(ours, theirs, strict=True)]


def _samples(one: Values, other: Values) -> tuple[list[float], list[float]]:
    """Return the values that are compared: of the common seeds, in the same order, if paired."""
    if not are_paired(one, other):
        return [*one.values()], [*other.values()]
    seeds = [seed for seed in one if seed in other]
    return [one[seed] for seed in seeds], [other[seed] for seed in seeds]


def holm(ps: Sequence[float], tests: int) -> list[float]:
    """Correct the p-values of several tests, in their order.

    At the level L, the chance that any of the tests finds a difference where there is none is at
    most L: Holm, *A simple sequentially rejective multiple test procedure*, 1979.

    Args:
        tests: how many there are, with those whose p-values are not given: among all of them the
            given ones come no earlier than in their own order, so that no factor is too small.
    """
    import numpy as np

    order = np.argsort(ps)
    factors = tests - np.arange(len(ps))
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.minimum(factors * np.array(ps)[order], 1))
    return corrected.tolist()
