"""Fit the power law of a loss, a + b x^-c, and the interval of its exponent.

Sources: Kaplan et al., *Scaling Laws for Neural Language Models*, 2020 (arXiv:2001.08361);
Hoffmann et al., *Training Compute-Optimal Large Language Models*, 2022 (arXiv:2203.15556), whose
law has the offset a, the loss that no x undercuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mingpt_ddp.results.stats.intervals import student_t

EXPONENTS = np.geomspace(0.005, 3.0, 4000)  # Kaplan's and Hoffmann's are 0.05 to 0.4
MIN_DISTINCT = 3  # of x; with more the law has an offset
MIN_SPAN = 4.0  # largest x / smallest x
MAX_SPAN = 1e12  # of x or of losses; no sweep has it, and its powers would overflow
POOR_SHARE = 0.9  # of the variation of the loss that a good fit explains, at least


@dataclass(frozen=True)
class PowerLaw:
    """loss = offset + factor * x^-exponent."""

    offset: float
    factor: float
    exponent: float
    low: float  # of the exponent's 95% interval
    high: float
    jobs: int
    explained: float  # share of the variation of the logarithm of the means

    def at(self, x: float) -> float:
        """Return the loss at x."""
        return self.offset + self.factor * x**-self.exponent

    @property
    def why_poor(self) -> str | None:
        """Why the law should not be trusted; None if nothing says so."""
        if self.explained < POOR_SHARE:
            share = max(self.explained, 0.0)
            return f"it explains {share:.0%} of the variation between the values of x"
        if self.low <= EXPONENTS[0] or self.high >= EXPONENTS[-1]:
            return "the jobs do not determine its exponent"
        if self.high - self.low > self.exponent:
            return "its exponent's interval is wider than the exponent"
        return None


def fit(xs: Sequence[float], ys: Sequence[float]) -> PowerLaw | None:
    """Fit a power law to the losses of jobs; return None if the values are too few or too close.

    It minimizes the squares of the relative residuals: for each exponent of a grid, offset >= 0 and
    factor > 0 follow from linear equations (variable projection: Golub and Pereyra, 1973), so that
    it needs no start values and cannot end in another minimum. The interval is the profile of these
    squares, by the F distribution: Bates and Watts, *Nonlinear Regression Analysis*, 1988, 6.1.

    Args:
        xs, ys: of each job.
    """
    x = np.asarray(xs, float)
    y = np.asarray(ys, float)
    distinct = np.unique(x)
    if len(distinct) < MIN_DISTINCT or not (distinct[0] > 0 and y.min() > 0):  # nan is neither
        return None
    span = distinct[-1] / distinct[0]
    if not MIN_SPAN <= span <= MAX_SPAN or y.max() / y.min() > MAX_SPAN:
        return None
    has_offset = len(distinct) > MIN_DISTINCT
    unit = float(y.max())  # so that squares of tiny losses do not overflow
    offsets, factors, errors = _solve(x / distinct[0], y / unit, has_offset)
    best = errors.argmin()
    offset, exponent = unit * float(offsets[best]), float(EXPONENTS[best])
    factor = unit * float(factors[best]) * float(distinct[0]) ** exponent
    freedom = max(len(y) - (3 if has_offset else 2), 1)
    # the quantile of F with 1 degree of freedom above is the square of Student's
    limit = errors[best] * (1 + student_t(freedom) ** 2 / freedom)
    inside = np.flatnonzero(errors <= limit)
    low = float(EXPONENTS[max(inside[0] - 1, 0)])  # a step of the grid is more than rounding
    high = float(EXPONENTS[min(inside[-1] + 1, len(EXPONENTS) - 1)])
    means = np.log([y[x == each].mean() for each in distinct])
    residuals = means - np.log(offset + factor * distinct**-exponent)
    variation = ((means - means.mean()) ** 2).sum()
    explained = 1 - float((residuals**2).sum() / variation) if variation > 0 else 0.0
    return PowerLaw(offset, factor, exponent, low, high, len(y), explained)


def _solve(x: np.ndarray, y: np.ndarray, has_offset: bool) -> tuple[np.ndarray, ...]:
    """Return the best offset, the best factor and the squares that they leave, by exponent.

    Args:
        x, y: (jobs,)
    """
    powers = x ** -EXPONENTS[:, None] / y  # (exponents, jobs)
    ones = 1 / y
    squares = (powers**2).sum(1)
    sums = powers.sum(1)
    factors = sums / squares
    offsets = np.zeros_like(factors)
    if has_offset:
        mixed = powers @ ones
        determinants = ones @ ones * squares - mixed**2
        free_factors = (ones @ ones * sums - mixed * ones.sum()) / determinants
        free_offsets = (squares * ones.sum() - mixed * sums) / determinants
        is_free = (free_offsets > 0) & (free_factors > 0)
        factors = np.where(is_free, free_factors, factors)
        offsets = np.where(is_free, free_offsets, offsets)
    errors = (offsets[:, None] * ones + factors[:, None] * powers - 1) ** 2
    return offsets, factors, errors.sum(1)
