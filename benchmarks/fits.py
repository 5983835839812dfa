"""How a cost grows: a constant and a power, fitted to a few measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPONENTS = np.linspace(0.25, 3, 111)  # those that are tried: 0.25, 0.275 ... 3


@dataclass(frozen=True)
class Law:
    """constant + factor x**exponent, neither of the first two below 0."""

    constant: float
    factor: float
    exponent: float
    error: float  # of the points, relative, root of the mean square

    def __call__(self, x: Any) -> Any:
        """At a number or at an array of them."""
        return self.constant + self.factor * x**self.exponent


def fit(xs: Sequence[float], ys: Sequence[float], exponent: float | None = None) -> Law:
    """The law with the least relative squares.

    Args:
        xs, ys: positive; two points at least, four where the exponent is not given.
        exponent: where it is known; else the best of `EXPONENTS`.

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
    """Of the least squares with both terms and with one alone, the best that has nothing below 0."""
    terms = np.stack([1 / y, x**p / y], axis=1)  # times (constant, factor) it should be 1
    both = np.linalg.lstsq(terms, np.ones(len(y)), rcond=None)[0]
    alone = terms.sum(axis=0) / (terms**2).sum(axis=0)
    laws = [pair for pair in (both, np.array([alone[0], 0.0]), np.array([0.0, alone[1]])) if (pair >= 0).all()]
    errors = [float(np.sqrt(np.mean((terms @ pair - 1) ** 2))) for pair in laws]
    best = int(np.argmin(errors))
    return Law(float(laws[best][0]), float(laws[best][1]), p, errors[best])
