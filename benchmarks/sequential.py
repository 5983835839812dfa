"""Simulate `until=decided`: how often it is wrong, how often it decides, and after how many pairs.

The results are drawn from a normal distribution, and nothing is trained. Each simulated comparison
has two settings, or five settings of which four are compared with the first. It is wrong if at
least one of its decisions is wrong. A decision is wrong if it claims a difference that is not
there, or one with the wrong sign. Coverage is the share of comparisons whose intervals all contain
the true difference at the end.

A fixed t-test, which looks once after all pairs, is shown for comparison. The last line shows how
often a t-test is wrong if somebody looks at it after each pair and stops at the first small p.

    python benchmarks/sequential.py
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean, median

import numpy as np
from common import log, parser, report

from mingpt_ddp.study.results.stats.sequential import Decision, Pair, SequentialTest

PAIRS = (5, 8, 12, 20)
EFFECTS = (0.5, 1.0, 2.0, 4.0)  # true differences, in standard deviations of the differences
LEVEL = 0.05


def pairs_of(ours: np.ndarray, theirs: np.ndarray) -> list[Pair]:
    """Return pairs of the results of the reference (ours) and another setting (theirs)."""
    return [Pair(float(one), float(other)) for one, other in zip(ours, theirs, strict=True)]


def comparison(seed: int, effect: float, settings: int, most: int) -> tuple[list[int], bool, bool]:
    """Simulate one comparison of settings with the first one.

    Args:
        effect: True difference of each other setting from the first one.
        settings: Number of settings.
        most: Number of pairs after which an undecided comparison ends.

    Returns:
        The number of pairs after which each other setting is decided, or 0 if it is not. Then True
        if a decision is wrong, and True if all intervals hold the true difference.
    """
    rng = np.random.default_rng([seed, settings, int(100 * effect)])
    ours = rng.normal(0, np.sqrt(0.5), most)
    test = SequentialTest(settings - 1)
    decided, is_wrong, is_covered = [], False, True
    for _ in range(settings - 1):
        pairs = pairs_of(ours, rng.normal(effect, np.sqrt(0.5), most))
        n = test.decided_after(pairs) or 0
        decided.append(n)
        evidence = test.evidence(pairs[: n or most])
        assert evidence is not None
        found = evidence.decision is Decision.DIFFERENT
        is_wrong |= found and (effect == 0 or evidence.difference * effect < 0)
        is_covered &= evidence.low <= effect <= evidence.high
    return decided, is_wrong, is_covered


def fixed_test(rng: np.random.Generator, effect: float, n: int, runs: int, settings: int) -> float:
    """Measure the share of simulated comparisons after n pairs that find any difference.

    Args:
        runs: Number of simulations.
        settings: The first one is compared with each other one, by Bonferroni's correction.
    """
    from scipy import stats

    ours = rng.normal(0, np.sqrt(0.5), (runs, 1, n))
    theirs = rng.normal(effect, np.sqrt(0.5), (runs, settings - 1, n))
    p = stats.ttest_1samp(theirs - ours, 0, axis=2).pvalue  # (runs, settings - 1)
    return float((p < LEVEL / (settings - 1)).any(axis=1).mean())


def looked_at(rng: np.random.Generator, most: int, runs: int) -> float:
    """Measure how often repeated t-tests find a difference that is not there.

    Each simulation looks at the t-test after every pair, from the third to the last one (`most`).
    """
    from scipy import stats

    x = rng.normal(0, 1, (runs, most))
    looks = [stats.ttest_1samp(x[:, :n], 0, axis=1).pvalue < LEVEL for n in range(3, most + 1)]
    return float(np.any(looks, axis=0).mean())


def main() -> None:
    options = parser(__doc__, "sequential")
    options.add_argument(
        "--runs", type=int, default=4000, help="number of simulations (default: %(default)s)"
    )
    chosen = options.parse_args()
    runs, most = chosen.runs, max(PAIRS)
    rng = np.random.default_rng(0)
    rows = []
    figures: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor() as pool:
        for settings, effect in [(2, 0.0), (5, 0.0), *((2, effect) for effect in EFFECTS)]:
            one = partial(comparison, effect=effect, settings=settings, most=most)
            done = [*pool.map(one, range(runs), chunksize=50)]
            wrong = fmean(is_wrong for _, is_wrong, _ in done)
            covered = fmean(is_covered for *_, is_covered in done)
            name = f"{settings} settings, effect {effect:g}"
            figures[name] = {"wrong": wrong, "covered": covered}
            cells = [name, f"{wrong:.1%}", f"{covered:.1%}"]
            for n in PAIRS:
                share = fmean(any(0 < each <= n for each in decided) for decided, *_ in done)
                fixed = fixed_test(rng, effect, n, runs, settings)
                figures[name] |= {f"decided in {n}": share, f"fixed test of {n}": fixed}
                cells.append(f"{share:.0%} / {fixed:.0%}")
            pairs = [min(filter(None, decided), default=most + 1) for decided, *_ in done]
            figures[name]["median pairs"] = middle = median(pairs)
            cells.append(f"{middle:g}" if middle <= most else f"over {most}")
            rows.append(cells)
            log(" ".join(cells))
    peeking = looked_at(rng, most, runs)
    log(f"a fixed test looked at after each of {most} pairs is wrong in {peeking:.1%}")
    shares = [f"within {n} pairs / fixed test" for n in PAIRS]
    head = ["simulated", "wrong", "interval covers", *shares, "median pairs"]
    two, five = (figures[f"{n} settings, effect 0"] for n in (2, 5))
    readme = [
        (
            f"`until=decided`, {runs} simulated comparisons without a difference, up to {most} "
            "pairs: wrong decisions",
            f"{two['wrong']:.1%} of 2 settings, {five['wrong']:.1%} of 5; a t-test looked at after "
            f"each pair {peeking:.1%}",
        )
    ]
    values = {"runs": runs, "figures": figures, "looked_at": peeking}
    report(chosen.out, values, head, rows, readme)


if __name__ == "__main__":
    main()
