"""Fit the power law of a loss, a + b x^-c, and the interval of its exponent.

Sources: Kaplan et al., *Scaling Laws for Neural Language Models*, 2020 (arXiv:2001.08361);
Hoffmann et al., *Training Compute-Optimal Large Language Models*, 2022 (arXiv:2203.15556), whose
law has the offset a, the loss that no x undercuts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mingpt_ddp.results.intervals import CONFIDENCE, student_t

Array: TypeAlias = NDArray[np.float64]

MIN_DISTINCT = 3  # of x
DISTINCT_WITH_OFFSET = 4
MIN_SPAN = 4.0  # largest x / smallest x
MAX_SPAN = 1e12  # no sweep; its powers would overflow
MAX_LOSS_SPAN = 1e6
EXPONENTS = (0.005, 3.0)  # Kaplan's and Hoffmann's are 0.05 to 0.4
GRID = 240  # exponents
RESAMPLES = 1000
POOR_SHARE = 0.9  # of the variation of the loss that a good fit explains, at least


@dataclass(frozen=True)
class PowerLaw:
    """loss = offset + factor * x^-exponent."""

    offset: float  # 0.0 of a law without
    factor: float
    exponent: float
    low: float  # of the exponent's 95% interval
    high: float
    jobs: int
    explained: float  # share of the variation of the logarithm of the means
    has_offset: bool

    def at(self, x: float) -> float:
        """Return the loss at x."""
        return self.offset + self.factor * x**-self.exponent

    @property
    def why_poor(self) -> str | None:
        """Why the law should not be trusted; None if nothing says so."""
        if self.explained < POOR_SHARE:
            share = max(self.explained, 0.0)
            return f"it explains {share:.0%} of the variation between the values of x"
        if self.low <= EXPONENTS[0] * 1.01 or self.high >= EXPONENTS[1] * 0.99:
            return "the jobs do not determine its exponent"
        if self.high - self.low > self.exponent:
            return "its exponent's interval is wider than the exponent"
        return None


def why_no_law(xs: Sequence[float]) -> str | None:
    """Return why no law can be fitted to losses at these x; None if one can."""
    distinct = {*xs}
    if any(not 0 < x < math.inf for x in distinct):
        return "a power law needs numbers above 0"
    if len(distinct) < MIN_DISTINCT:
        return f"a power law needs {MIN_DISTINCT} different values, not {len(distinct)}"
    span = max(distinct) / min(distinct)
    if span < MIN_SPAN:
        return f"a power law needs values that span a factor of {MIN_SPAN:.0f}, not {span:.2g}"
    if span > MAX_SPAN:
        return f"a power law needs values that span at most a factor of {MAX_SPAN:.0e}"
    return None


def fit(xs: Sequence[float], ys: Sequence[float], seed: int = 0) -> PowerLaw:
    """Fit a power law to the losses of jobs; without an offset if x has fewer than four values.

    It minimizes the squares of the relative residuals of the means at each x, weighted by the
    number of jobs there: for each exponent of a grid, offset >= 0 and factor >= 0 follow from
    linear equations (variable projection: Golub and Pereyra, 1973), then the grid is refined. So
    it needs no start values, and cannot end in another minimum.

    The interval is that of the bootstrap's percentiles: Efron and Tibshirani, *An Introduction to
    the Bootstrap*, 1993. With two jobs or more at each x, it draws jobs within each x; else the
    residuals of the fit. Few residuals are smaller than the errors, and vary by chance: they are
    widened by the degrees of freedom that their means or the fit took, and the interval by the
    ratio of Student's t to the normal distribution.

    Args:
        xs, ys: of each job, all above 0.
        seed: of the draws: the same jobs have the same interval.

    Raises:
        ValueError: `why_no_law` says why.
        ImportError: scipy is not installed.
    """
    reason = why_no_law(xs)
    if reason is not None:
        raise ValueError(reason)
    if any(not 0 < y < math.inf for y in ys) or max(ys) / min(ys) > MAX_LOSS_SPAN:
        raise ValueError(f"a power law needs losses above 0 within a factor of {MAX_LOSS_SPAN:.0e}")
    x, at_x = np.unique(np.asarray(xs, float), return_inverse=True)
    unit = max(ys)  # so that the weights of tiny losses do not overflow
    y = np.asarray(ys, float) / unit
    counts = np.bincount(at_x).astype(float)
    has_offset = len(x) >= DISTINCT_WITH_OFFSET
    means = np.bincount(at_x, y) / counts
    offset, factor, exponent = _fit(x, means[None], counts, has_offset)
    fitted = offset[0] + factor[0] * x ** -exponent[0]
    samples = _resampled_means(y, at_x, counts, fitted, has_offset, np.random.default_rng(seed))
    _, _, exponents = _fit(x, samples, counts, has_offset)
    edges = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(exponents, edges)
    is_replicated = counts.min() >= 2
    freedom = len(y) - (len(x) if is_replicated else _values(has_offset))
    widening = student_t(max(freedom, 1)) / student_t(math.inf)
    return PowerLaw(
        offset=float(offset[0] * unit),
        factor=float(factor[0] * unit),
        exponent=float(exponent[0]),
        low=max(0.0, float(exponent[0] - widening * (exponent[0] - low))),
        high=float(exponent[0] + widening * (high - exponent[0])),
        jobs=len(y),
        explained=_explained(np.log(means), np.log(fitted)),
        has_offset=has_offset,
    )


def _fit(x: Array, means: Array, counts: Array, has_offset: bool) -> tuple[Array, Array, Array]:
    """Return offset, factor and exponent for each row of means.

    Args:
        x: (X,)
        means: (R, X)
        counts: (X,) jobs of each mean
    """
    scaled = x / math.sqrt(x[0] * x[-1])  # for the condition of the equations
    exponents = np.tile(np.geomspace(*EXPONENTS, GRID), (len(means), 1))
    for _ in range(4):  # each refines the interval between the neighbours of the best one
        error, _, _ = _solve(scaled, means, counts, exponents, has_offset)
        best = error.argmin(1)
        rows = np.arange(len(means))
        low = exponents[rows, np.maximum(best - 1, 0)]
        high = exponents[rows, np.minimum(best + 1, exponents.shape[1] - 1)]
        steps = np.linspace(0, 1, 9)
        exponents = low[:, None] * (high / low)[:, None] ** steps
    error, offset, factor = _solve(scaled, means, counts, exponents, has_offset)
    rows = np.arange(len(means))
    best = error.argmin(1)
    exponent = exponents[rows, best]
    unscaled = factor[rows, best] * (scaled[0] / x[0]) ** -exponent
    return offset[rows, best], unscaled, exponent


def _solve(
    x: Array, means: Array, counts: Array, exponents: Array, has_offset: bool
) -> tuple[Array, Array, Array]:
    """Return the error, the best offset and the best factor, for rows of means and exponents.

    Args:
        exponents: (R, E), as the results
    """
    weights = counts / means**2  # (R, X), of relative residuals
    powers = x ** -exponents[..., None]  # (R, E, X)
    w = weights[:, None]
    y = means[:, None]
    sum_w = w.sum(-1)
    sum_y = (w * y).sum(-1)
    sum_p = (w * powers).sum(-1)
    sum_pp = (w * powers**2).sum(-1)
    sum_py = (w * powers * y).sum(-1)
    factor = sum_py / sum_pp  # without offset
    offset = np.zeros_like(factor)
    if has_offset:
        determinant = sum_w * sum_pp - sum_p**2
        free_factor = (sum_w * sum_py - sum_p * sum_y) / np.maximum(determinant, 1e-300)
        free_offset = (sum_y - free_factor * sum_p) / sum_w
        is_free = (determinant > 1e-12 * sum_w * sum_pp) & (free_offset > 0) & (free_factor > 0)
        factor = np.where(is_free, free_factor, factor)
        offset = np.where(is_free, free_offset, offset)
    residuals = y - offset[..., None] - factor[..., None] * powers
    return (w * residuals**2).sum(-1), offset, factor


def _resampled_means(
    y: Array,
    at_x: NDArray[np.intp],
    counts: Array,
    fitted: Array,
    has_offset: bool,
    rng: np.random.Generator,
) -> Array:
    """Return RESAMPLES rows of means at each x, as other jobs might have had them."""
    means = np.bincount(at_x, y) / counts
    if counts.min() >= 2:
        rows = []
        for index, mean in enumerate(means):
            residuals = y[at_x == index] - mean
            n = len(residuals)
            drawn = rng.choice(residuals, (RESAMPLES, n)) * math.sqrt(n / (n - 1))
            rows.append(mean + drawn.mean(1))
        samples = np.stack(rows, 1)
    else:
        relative = y / fitted[at_x] - 1
        freedom = max(len(y) - _values(has_offset), 1)
        drawn = rng.choice(relative, (RESAMPLES, len(y))) * math.sqrt(len(y) / freedom)
        values = fitted[at_x] * (1 + drawn)
        samples = np.stack([values[:, at_x == i].mean(1) for i in range(len(means))], 1)
    return np.maximum(samples, 1e-3 * means)


def _values(has_offset: bool) -> int:
    """Return how many values are fitted."""
    return 3 if has_offset else 2


def _explained(measured: Array, fitted: Array) -> float:
    """Return the coefficient of determination; 0 if nothing varies."""
    total = float(((measured - measured.mean()) ** 2).sum())
    if total == 0:
        return 0.0
    return 1 - float(((measured - fitted) ** 2).sum()) / total
