"""Fit scaling laws, each a constant plus a power law, to a few measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPONENTS = np.linspace(0.25, 3, 111)  # exponents to try: 0.25, 0.275 ... 3


@dataclass(frozen=True)
class Law:
    """The law constant + factor * x**exponent, with constant and factor >= 0.

    `error` is the relative root-mean-square error of the points.
    """

    constant: float
    factor: float
    exponent: float
    error: float

    def __call__(self, x: Any) -> Any:
        """Evaluate the law at a number or an array."""
        return self.constant + self.factor * x**self.exponent


def fit(xs: Sequence[float], ys: Sequence[float], exponent: float | None = None) -> Law:
    """Fit a law by relative least squares.

    Args:
        xs, ys: Positive coordinates of at least two points, or four if no exponent is given.
        exponent: The exponent, if it is known. None takes the best of `EXPONENTS`.

    Raises:
        ValueError: There are too few points.
    """
    needed = 4 if exponent is None else 2
    if len(set(xs)) < needed or len(xs) != len(ys):
        raise ValueError(f"{len(xs)} and {len(ys)} values: {needed} different points are needed")
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    tried = EXPONENTS if exponent is None else [exponent]
    return min((_with_exponent(x, y, float(p)) for p in tried), key=lambda law: law.error)


def _with_exponent(x: np.ndarray, y: np.ndarray, p: float) -> Law:
    """Fit both terms or one of them, with coefficients of at least 0, and return the best fit."""
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
