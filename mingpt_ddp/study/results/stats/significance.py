"""Test whether the results of two settings differ by more than the chance of their seeds.

A setting is a configuration without its seed. It has one result for each seed.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mingpt_ddp.study.results.stats.intervals import CONFIDENCE

# Chance that two settings are called different although they are equal.
LEVEL = 1 - CONFIDENCE
MIN_PAIRS = 3  # fewer pairs of seeds are not compared seed by seed
PAIRED = "paired t"
SEQUENTIAL = "sequential"
# A spread below this share of the largest value is rounding. It says nothing about chance.
ROUNDING = 1e-12
Values = Mapping[str, float]  # results of a setting by seed


@dataclass(frozen=True)
class Difference:
    """The mean of the second setting minus the mean of the first one, over the tested seeds."""

    difference: float
    low: float  # lower end of the 95% interval
    high: float  # upper end of the 95% interval
    p: float  # chance that equal settings show a difference at least as large (two-sided)
    test: str  # PAIRED, SEQUENTIAL or "Welch"
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
    """Return True if two settings are compared seed by seed, because they share most seeds.

    Runs with the same seed begin with the same weights and read the same batches, so their
    difference varies less than their results. With two pairs, however, the interval would be wider
    than without pairing: 12.7 standard errors instead of about 4.3. MIN_PAIRS is therefore 3.

    Only the seeds decide. A choice that depends on the results would spoil the level of the test.
    """
    pairs = len({*one} & {*other})
    return pairs >= MIN_PAIRS and 2 * pairs >= max(len(one), len(other))


def why_incomparable(one: Values, other: Values) -> str | None:
    """Explain why the difference cannot be tested. Return None if it can."""
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
        return "all seeds of a setting have the same result, which says nothing about chance"
    gap = abs(statistics.fmean(samples[0]))
    if gap <= rounding:
        return "each seed has the same result in both settings"
    return f"each seed has the same difference, {gap:.4g}, which says nothing about chance"


def difference(one: Values, other: Values) -> Difference:
    """Test the difference of two means, other - one, over the tested seeds.

    Paired results are tested with the t-test of their differences: Student, *The probable error of
    a mean*, 1908. Other results are tested with the t-test of Welch, *The generalization of
    "Student's" problem when several different population variances are involved*, 1947. Both tests
    assume that the results of many seeds are normally distributed.

    Args:
        one, other: Results by seed. `why_incomparable` must return None for them.

    Returns:
        The difference with its 95% interval.
    """
    from scipy import stats

    first, second = _samples(one, other)
    if are_paired(one, other):
        name, test = PAIRED, stats.ttest_rel(second, first)
        mean = statistics.fmean(_differences(first, second))
    else:
        name, test = "Welch", stats.ttest_ind(second, first, equal_var=False)
        mean = statistics.fmean(second) - statistics.fmean(first)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    seeds = len(first), len(second)
    left_out = len(one) + len(other) - sum(seeds)
    return Difference(mean, low, high, float(test.pvalue), name, seeds, left_out)


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip(first, second, strict=True)]


def _samples(one: Values, other: Values) -> tuple[list[float], list[float]]:
    """Return the values of each setting that are compared.

    If the settings are paired, these are the values of the common seeds, in the same order.
    """
    if not are_paired(one, other):
        return [*one.values()], [*other.values()]
    seeds = [seed for seed in one if seed in other]
    return [one[seed] for seed in seeds], [other[seed] for seed in seeds]


def holm(ps: Sequence[float], tests: int) -> list[float]:
    """Correct the p-values of several tests. Return them in the same order.

    If pairs of settings with a corrected p below L are called different, the chance that any pair
    is called different by mistake is at most L. Source: Holm, *A simple sequentially rejective
    multiple test procedure*, 1979.

    Args:
        ps: The p-values to correct.
        tests: Number of all tests. Some of their p-values may be missing from `ps`. The correction
            is then at least as large as it would be with all p-values.
    """
    import numpy as np

    order = np.argsort(ps)
    factors = tests - np.arange(len(ps))
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.minimum(factors * np.array(ps)[order], 1))
    return corrected.tolist()
