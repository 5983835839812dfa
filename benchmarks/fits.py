"""Scaling laws: a constant plus a power law, fitted to a few measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPONENTS = np.linspace(0.25, 3, 111)  # candidates: 0.25, 0.275 ... 3


@dataclass(frozen=True)
class Law:
    """constant + factor * x**exponent, with constant and factor >= 0."""

    constant: float
    factor: float
    exponent: float
    error: float  # relative root-mean-square error of the points

    def __call__(self, x: Any) -> Any:
        """Evaluate at a number or an array."""
        return self.constant + self.factor * x**self.exponent


def fit(xs: Sequence[float], ys: Sequence[float], exponent: float | None = None) -> Law:
    """Fit a law by relative least squares.

    Args:
        xs, ys: positive; at least two points, four without an exponent.
        exponent: if known; otherwise the best of `EXPONENTS`.

    Raises:
        ValueError: too few points.
    """
    needed = 4 if exponent is None else 2
    if len(set(xs)) < needed or len(xs) != len(ys):
        raise ValueError(f"{len(xs)} and {len(ys)} values: {needed} different points are needed")
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    tried = EXPONENTS if exponent is None else [exponent]
    return min((_with_exponent(x, y, float(p)) for p in tried), key=lambda law: law.error)


def _with_exponent(x: np.ndarray, y: np.ndarray, p: float) -> Law:
    """Return the best least-squares fit of both terms or one, with coefficients of at least 0."""
    terms = np.stack([1 / y, x**p / y], axis=1)  # terms @ (constant, factor) should be 1
    both = np.linalg.lstsq(terms, np.ones(len(y)), rcond=None)[0]
    alone = terms.sum(axis=0) / (terms**2).sum(axis=0)
    laws = [
        pair
        for pair in (both, np.array([alone[0], 0.0]), np.array([0.0, alone[1]]))
        if (pair >= 0).all()
    ]
    errors = [float(np.sqrt(np.mean((terms @ pair - 1) ** 2))) for pair in laws]
    best = int(np.argmin(errors))
    return Law(float(laws[best][0]), float(laws[best][1]), p, errors[best])
