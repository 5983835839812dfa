"""Estimate a mean from a few values, with its 95% interval by Student's t."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of n independent values, and how far it may be from the true mean.

    The deviation and the interval are None if there is only one value. The mean is None if there is
    no value.
    """

    n: int = 0
    mean: float | None = None
    deviation: float | None = None  # standard deviation of the sample (divides by n - 1)
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, as in `mean ± half width`."""
        return None if self.high is None or self.low is None else (self.high - self.low) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Compute mean, sample standard deviation s and 95% interval, mean ± t s / sqrt(n).

    The interval assumes that the values are independent and normally distributed: Student,
    *The probable error of a mean*, 1908.

    Args:
        values: Finite numbers.
    """
    n = len(values)
    if n == 0:
        return Estimate()
    mean = statistics.fmean(values)
    if n == 1:
        return Estimate(n, mean)
    deviation = statistics.stdev(values)
    half = student_t(n - 1) * deviation / math.sqrt(n)
    return Estimate(n, mean, deviation, mean - half, mean + half)


@cache
def student_t(degrees: float) -> float:
    """Return t such that 95% of Student's distribution lies between -t and t.

    scipy.special has the same quantiles as scipy.stats.t, and is imported in a third of the time.

    Args:
        degrees: Degrees of freedom.
    """
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
