"""Fit the power law of a loss, a + b x^-c, and the interval of its exponent.

Sources: Kaplan et al., *Scaling Laws for Neural Language Models*, 2020 (arXiv:2001.08361);
Hoffmann et al., *Training Compute-Optimal Large Language Models*, 2022 (arXiv:2203.15556), whose
law has the offset a, the loss that no x undercuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mingpt_ddp.results.stats.intervals import student_t

EXPONENTS = np.geomspace(0.005, 3.0, 100)  # Kaplan's and Hoffmann's are 0.05 to 0.4
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

    It minimizes the squares of the relative residuals: for each exponent, offset >= 0 and factor
    >= 0 follow from linear equations (variable projection: Golub and Pereyra, 1973), so that it
    needs no start values, and a grid of exponents finds the lowest minimum. The interval is the
    profile of these squares, by the F distribution: Bates and Watts, *Nonlinear Regression
    Analysis*, 1988, 6.1.

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
    from scipy.optimize import brentq, minimize_scalar, nnls  # half a second, for a law alone

    has_offset = len(distinct) > MIN_DISTINCT
    weights = y.max() / y  # squares of tiny losses would overflow

    def solve(exponent: float) -> tuple[np.ndarray, float]:
        powers = (x / distinct[0]) ** -exponent
        columns = np.stack([np.full(len(x), has_offset), powers], axis=1)
        return nnls(columns * weights[:, None], np.ones(len(x)))

    def squares(exponent: float, limit: float = 0.0) -> float:
        return solve(exponent)[1] ** 2 - limit

    nearest = int(np.argmin([squares(each) for each in EXPONENTS]))
    around = EXPONENTS[[max(nearest - 1, 0), min(nearest + 1, len(EXPONENTS) - 1)]]
    best = minimize_scalar(squares, bounds=around, method="bounded", options={"xatol": 1e-9})
    freedom = max(len(y) - (3 if has_offset else 2), 1)
    # the quantile of F with 1 degree of freedom above is the square of Student's
    limit = best.fun * (1 + student_t(freedom) ** 2 / freedom)
    ends = []
    for end in EXPONENTS[[0, -1]]:
        is_outside = squares(end) > limit
        ends.append(brentq(squares, end, best.x, (limit,)) if is_outside else end)
    offset, factor = y.max() * solve(best.x)[0]
    factor *= distinct[0] ** best.x
    means = np.log([y[x == each].mean() for each in distinct])
    residuals = means - np.log(offset + factor * distinct**-best.x)
    variation = ((means - means.mean()) ** 2).sum()
    explained = 1 - float((residuals**2).sum() / variation) if variation > 0 else 0.0
    offset, factor, exponent, low, high = map(float, (offset, factor, best.x, *ends))
    return PowerLaw(offset, factor, exponent, low, high, len(y), explained)
