"""How often `until=decided` is wrong, how often it decides, and after how many pairs.

Differences are drawn from a normal distribution; nothing is trained. Without a difference, the
share of decisions is the rate of errors: of two settings, and of five against the first one, where
one wrong decision makes a comparison wrong. Coverage is the share of comparisons whose interval
holds the true difference when the comparison ends. The fixed t-test, which looks once after all
pairs, stands beside the sequential one; looking at it after each pair shows what that costs.

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
EFFECTS = (0.5, 1.0, 2.0, 4.0)  # in standard deviations of the differences
LEVEL = 0.05


def pairs_of(ours: np.ndarray, theirs: np.ndarray) -> list[Pair]:
    return [Pair(float(one), float(other)) for one, other in zip(ours, theirs, strict=True)]


def comparison(seed: int, effect: float, settings: int, most: int) -> tuple[list[int], bool, bool]:
    """Compare settings until all are decided.

    Returns:
        The number of pairs after which each other setting is decided (0: it is not), whether one
        of the decisions is wrong, and whether all intervals hold the true difference.
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


def fixed_test(rng: np.random.Generator, effect: float, n: int, runs: int) -> float:
    """Return the share of fixed paired t-tests of n pairs that find a difference."""
    from scipy import stats

    x = rng.normal(effect, 1, (runs, n))
    return float((stats.ttest_1samp(x, 0, axis=1).pvalue < LEVEL).mean())


def looked_at(rng: np.random.Generator, most: int, runs: int) -> float:
    """Return the share of t-tests that ever find a difference where none is, from 3 pairs on."""
    from scipy import stats

    x = rng.normal(0, 1, (runs, most))
    looks = [stats.ttest_1samp(x[:, :n], 0, axis=1).pvalue < LEVEL for n in range(3, most + 1)]
    return float(np.any(looks, axis=0).mean())


def main() -> None:
    options = parser(__doc__, "sequential")
    options.add_argument("--runs", type=int, default=4000, help="(default: %(default)s)")
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
                share = fmean(0 < min(decided) <= n for decided, *_ in done)
                fixed = fixed_test(rng, effect, n, runs)
                figures[name] |= {f"decided in {n}": share, f"fixed test of {n}": fixed}
                cells.append(f"{share:.0%} / {fixed:.0%}")
            pairs = [min(decided) or most + 1 for decided, *_ in done]
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
