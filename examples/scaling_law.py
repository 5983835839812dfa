r"""Fit a scaling law to the losses of runs of several sizes.

    python main.py -m experiment=demo run.name=sizes model.n_layer=1 model.n_embd=16,32,64,96 \
        trainer.max_steps=20 trainer.eval_steps=10 trainer.sample_every=null run.seed=1,2 \
        && python examples/scaling_law.py outputs/sizes

The law is loss = offset + factor * x^-exponent, where x is the number of parameters. To use another
setting of the runs as x, such as data.truncate or trainer.max_steps, give its name as a second
argument. Sweep only this setting and the seed, because each combination of other settings has its
own law. A law needs at least three values of x, and the largest must be four times the smallest.
Five values or more are better. With three values the law has no offset. Tune the learning rate at
each size first. Otherwise the exponent describes a recipe whose learning rate is wrong at most
sizes.

Sources: Kaplan et al., Scaling Laws for Neural Language Models, 2020 (arXiv:2001.08361), and
Hoffmann et al., Training Compute-Optimal Large Language Models, 2022 (arXiv:2203.15556). The second
one introduces the offset, the loss that remains at any size.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

import mingpt_ddp

CONFIDENCE = 0.95
EXPONENTS = np.geomspace(0.005, 3.0, 100)  # published exponents are 0.05 to 0.4


class Law(NamedTuple):
    """The law loss = offset + factor * x^-exponent.

    `low` and `high` are the ends of the confidence interval of the exponent.
    """

    offset: float
    factor: float
    exponent: float
    low: float
    high: float


def fit(xs: Sequence[float], losses: Sequence[float]) -> Law:
    """Fit a law by least squares of the relative residuals.

    For each exponent, the offset and the factor follow from linear equations, and neither may be
    negative (variable projection: Golub and Pereyra, 1973). A grid of exponents finds the lowest of
    several minima. The interval contains the exponents whose sum of squares passes an F test
    (Bates and Watts, Nonlinear Regression Analysis, 1988, 6.1).

    Raises:
        ValueError: There are fewer than three values of x, or they are too close to each other.
    """
    x, y = np.array(xs), np.array(losses)
    distinct = np.unique(x)
    if len(distinct) < 3 or not 0 < 4 * distinct[0] <= distinct[-1]:
        raise ValueError(
            "a law needs runs at three or more values of x, the largest at least four times the "
            "smallest"
        )
    has_offset = len(distinct) > 3

    def solve(exponent: float) -> tuple[np.ndarray, float]:
        powers = (x / distinct[0]) ** -exponent
        columns = np.stack([np.full(len(x), has_offset), powers], axis=1)
        return optimize.nnls(columns / y[:, None], np.ones(len(x)))

    def squares(exponent: float, limit: float = 0.0) -> float:
        return solve(exponent)[1] ** 2 - limit

    nearest = int(np.argmin([squares(each) for each in EXPONENTS]))
    around = EXPONENTS[[max(nearest - 1, 0), min(nearest + 1, len(EXPONENTS) - 1)]]
    best = optimize.minimize_scalar(
        squares, bounds=around, method="bounded", options={"xatol": 1e-9}
    ).x
    freedom = max(len(x) - (3 if has_offset else 2), 1)
    limit = squares(best) * (1 + stats.f.ppf(CONFIDENCE, 1, freedom) / freedom)
    ends = []
    for end in EXPONENTS[[0, -1]]:
        is_outside = squares(end) > limit
        ends.append(optimize.brentq(squares, end, best, (limit,)) if is_outside else end)
    offset, factor = solve(best)[0]
    return Law(*map(float, (offset, factor * distinct[0] ** best, best, *ends)))


def main(directory: str, name: str = "parameters") -> None:
    """Fit a law to the complete runs in a directory, and print it.

    Args:
        directory: Directory of the sweep.
        name: Name of x: a setting of the runs, or "parameters".
    """
    runs = [row for row in mingpt_ddp.rows(directory) if row["status"] == "complete"]
    found = [(row[name], row["val_loss"]) for row in runs if row.get(name) and row["val_loss"]]
    try:
        law = fit(*zip(*found, strict=True)) if found else sys.exit(f"no run has {name}")
    except ValueError as error:
        sys.exit(str(error))
    print(f"val_loss = {law.offset:.4g} + {law.factor:.4g} * {name}^-{law.exponent:.3f}")
    interval = f"95% interval {law.low:.3f} to {law.high:.3f}"
    print(f"exponent {law.exponent:.3f}, {interval}, of {len(found)} runs")
    if law.low <= EXPONENTS[0] or law.high >= EXPONENTS[-1] or law.high - law.low > law.exponent:
        print("These runs do not determine the exponent: train more sizes, or more seeds.")


if __name__ == "__main__":
    with mingpt_ddp.one_line_errors():
        main(*sys.argv[1:])
