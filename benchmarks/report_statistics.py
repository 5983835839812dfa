"""Measure how often the statistics of a report are right, on losses of real runs.

The script trains two recipes, which differ in the learning rate, with 40 seeds each. It draws sets
of their final validation losses 4,000 times, to answer these questions:

* How often does `report compare` call a recipe different from itself? Two sets of seeds of one
  recipe have no seed in common. It should be 5% of the draws. The variance of the difference of two
  such means is the same as for draws from an unlimited population, so the size of the pool does not
  matter. For paired tests, the pairs are drawn at random.
* How often does any comparison of the best of two, four or twenty sets of one recipe claim a
  difference? This is measured with the correction that the command makes, and without it.
* How often does the 95% interval of a mean cover the true mean? It should be 95% of the draws. They
  are drawn with replacement, so the pool is the whole population, and its mean is the true one.
* How often is a difference of two standard deviations found, with five seeds each? One set is
  shifted by this much. It should be as often as the noncentral t distribution says.
* How much narrower is the paired interval than Welch's, and how often does each find the difference
  between the recipes? Both get the same five seeds of the two recipes.
* How often is a verdict on two settings with unequal seeds wrong? There are 5 seeds against 3, 6
  against 3, and 6 against 6, each of which is missing with a probability of 30%. Losses are
  normally distributed, and part of a loss depends only on the seed. Without a difference, `report
  compare` should give a verdict in at most 5% of the draws. With a difference of one standard
  deviation of the pairs, at most 0.2% of the draws should have a verdict with the wrong sign, and
  the interval should cover the difference in 95%.

All draws share one pool, whose shape affects the results. Most pools are not normally distributed,
which shifts the shares. With 4,000 draws, a share of 5% also varies by a third of a percent.

    python benchmarks/report_statistics.py
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, log, parser, report, timed
from scipy import stats

from mingpt_ddp.study.results.analysis.compare import Setting, compare
from mingpt_ddp.study.results.runs import MetricsSummary, RunRecord, by_objective, read_jobs
from mingpt_ddp.study.results.stats.intervals import estimate
from mingpt_ddp.study.results.stats.significance import LEVEL, difference

SEEDS = 40
LRS = (0.003, 0.006)
RUN = (
    "model=gpt_nano model.n_layer=1 model.n_embd=24 data.block_size=32 data.truncate=0.05 "
    "trainer.max_epochs=null trainer.max_steps=500 trainer.eval_every=500 trainer.log_every=100 "
    "trainer.batch_size=12 trainer.precision=fp32 optimizer.warmup_steps=10 "
    "snapshot.every_steps=null"
)
HEADER = ["question", "theory", "measured"]
SHIFT = 2.0  # the difference to find, in standard deviations
# The numbers of seeds of two settings, and the probability that a seed is missing.
UNEQUAL = {
    "3 against 3 seeds": (3, 3, 0.0),
    "5 against 3 seeds": (5, 3, 0.0),
    "6 against 3 seeds": (6, 3, 0.0),
    "6 against 6 seeds, 30% missing": (6, 6, 0.3),
}
SPREAD = 0.05  # standard deviation of the differences between paired losses


def train(root: Path) -> Path:
    """Train all seeds of both recipes in one process, and return the directory of the sweep."""
    sweep = [f"optimizer.lr={','.join(map(str, LRS))}", f"run.seed=range(0,{SEEDS})"]
    words = ["-m", "run.name=seeds", *RUN.split(), *sweep]
    wall, _ = timed([sys.executable, str(ROOT / "main.py"), *words], root)
    log(f"trained {SEEDS * len(LRS)} runs in {wall:.0f} s")
    return root / "outputs" / "seeds"


def losses(directory: Path) -> dict[float, dict[str, float]]:
    """Read the final losses of a sweep, by learning rate and seed."""
    found: dict[float, dict[str, float]] = {}
    for job in read_jobs([directory]):
        assert job.objective is not None, job.name
        by_seed = found.setdefault(float(job.config["optimizer.lr"]), {})
        by_seed[str(job.config["run.seed"])] = job.objective
    return found


def skewness(values: Sequence[float]) -> float:
    """Compute the third standardized moment, which is 0 for a normal distribution."""
    mean = statistics.fmean(values)
    return (
        statistics.fmean((value - mean) ** 3 for value in values) / statistics.pstdev(values) ** 3
    )


def numbered(values: Sequence[float], first: int = 0) -> dict[str, float]:
    """Number values as if by seeds. Two sets with the same `first` are paired."""
    return {str(first + number): value for number, value in enumerate(values)}


def two_sets(
    pool: list[float], n: int, paired: bool, rng: random.Random
) -> tuple[dict[str, float], dict[str, float]]:
    """Draw two sets of n values from a pool. No value is in both sets."""
    drawn = rng.sample(pool, 2 * n)
    return numbered(drawn[:n]), numbered(drawn[n:], first=0 if paired else n)


def share(event: Callable[[], bool], draws: int) -> float:
    return sum(event() for _ in range(draws)) / draws


def false_claims(pool: list[float], n: int, paired: bool, draws: int, rng: random.Random) -> float:
    return share(lambda: difference(*two_sets(pool, n, paired, rng)).p < LEVEL, draws)


def coverage(pool: list[float], n: int, draws: int, rng: random.Random) -> float:
    """Measure how often the interval of n draws with replacement covers the mean of the pool."""
    truth = statistics.fmean(pool)

    def covers() -> bool:
        found = estimate(rng.choices(pool, k=n))
        assert found.low is not None and found.high is not None
        return found.low <= truth <= found.high

    return share(covers, draws)


def found_shifts(
    pool: list[float], n: int, paired: bool, draws: int, rng: random.Random
) -> tuple[float, float]:
    """Compute how often a shift of SHIFT deviations is found, in theory and as measured."""
    deviation = statistics.stdev(pool)

    def finds() -> bool:
        one, other = two_sets(pool, n, paired, rng)
        shifted = {seed: value + SHIFT * deviation for seed, value in other.items()}
        return difference(one, shifted).p < LEVEL

    freedom = (1 if paired else 2) * (n - 1)
    shift = SHIFT / 2**0.5 * n**0.5
    threshold = stats.t.isf(LEVEL / 2, freedom)
    return float(stats.nct.sf(threshold, freedom, shift)), share(finds, draws)


def setting(label: str, values: dict[str, float]) -> Setting:
    """Make a setting of complete jobs with these losses, by seed."""
    jobs = []
    for seed, loss in values.items():
        config: dict[str, Any] = {"run.seed": seed}
        jobs.append(
            RunRecord(
                seed, Path(seed), "complete", config, {"val_loss": loss}, MetricsSummary(), []
            )
        )
    return Setting(jobs, {}, label)


def claims_of_the_best(
    pool: list[float], n: int, settings: int, draws: int, rng: random.Random
) -> tuple[float, float]:
    """Measure how often the best of equal settings is claimed to be better.

    If the pool has too few runs for all settings, runs are drawn with replacement.

    Returns:
        The share of draws with such a claim, with the correction and without it.
    """
    corrected = plain = 0
    for _ in range(draws):
        size = settings * n
        drawn = rng.sample(pool, size) if size <= len(pool) else rng.choices(pool, k=size)
        sets = [numbered(drawn[first : first + n], first) for first in range(0, size, n)]
        named = [setting(str(number), values) for number, values in enumerate(sets)]
        comparisons = compare(sorted(named, key=by_objective))
        corrected += any(comparison.better is not None for comparison in comparisons)
        plain += any(c.difference is not None and c.difference.p < LEVEL for c in comparisons)
    return corrected / draws, plain / draws


def unequal_seeds(
    seeds: tuple[int, int, float], difference: float, draws: int
) -> tuple[float, float, float]:
    """Compare two settings with unequal seeds, of which the second is worse by a true difference.

    Args:
        seeds: The number of seeds of each setting, and the probability that a seed is missing.
        difference: The true difference.
        draws: The number of draws.

    Returns:
        Three shares: the draws with a verdict, the draws with a verdict of the wrong sign, and the
        tests whose interval covers the true difference.
    """
    rng = np.random.default_rng(1)
    *counts, missing = seeds
    shape = draws, 2, max(counts)
    losses = 2 + SPREAD * rng.standard_normal((draws, 1, max(counts)))
    losses = losses + SPREAD / 2**0.5 * rng.standard_normal(shape)
    losses[:, 1] += difference
    is_there = rng.random(shape) >= missing
    is_there &= np.arange(max(counts)) < np.array(counts)[:, None]
    verdicts = wrong = covered = tests = 0
    for values, kept in zip(losses, is_there, strict=True):
        one, other = (
            setting(
                label, {str(seed): float(values[number, seed]) for seed in np.flatnonzero(each)}
            )
            for number, (label, each) in enumerate(zip(("one", "other"), kept, strict=True))
        )
        named = [each for each in (one, other) if each.jobs]
        for comparison in compare(sorted(named, key=by_objective)):
            if (test := comparison.difference) is None:
                continue
            tests += 1
            truth = difference if comparison.reference is one else -difference
            covered += test.low <= truth <= test.high
            verdicts += comparison.better is not None
            wrong += comparison.better is other
    return verdicts / draws, wrong / draws, covered / tests


def pairing(
    one: dict[str, float], other: dict[str, float], n: int, draws: int, rng: random.Random
) -> dict[str, float]:
    """Compare the paired test with Welch's on n common seeds of two recipes."""
    widths = []
    paired_finds = welch_finds = 0
    for _ in range(draws):
        seeds = rng.sample([*one], n)
        ours = {seed: one[seed] for seed in seeds}
        paired = difference(ours, {seed: other[seed] for seed in seeds})
        welch = difference(ours, {f"other {seed}": other[seed] for seed in seeds})
        widths.append((paired.high - paired.low) / (welch.high - welch.low))
        paired_finds += paired.p < LEVEL
        welch_finds += welch.p < LEVEL
    correlation = statistics.correlation([*one.values()], [other[seed] for seed in one])
    return {
        "correlation": correlation,
        "width": statistics.median(widths),
        "paired_finds": paired_finds / draws,
        "welch_finds": welch_finds / draws,
    }


def measure(pools: dict[float, dict[str, float]], draws: int) -> tuple[list[list[str]], Any]:
    """Answer all questions, and return the rows of the table and the figures."""
    rng = random.Random(1)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}

    def add(question: str, theory: str, value: float) -> None:
        figures[question] = value
        rows.append([question, theory, f"{value:.2%}"])
        log(f"{question}: {value:.1%} ({theory})")

    for lr, (n, test) in itertools.product(LRS, itertools.product((3, 5), ("paired", "Welch"))):
        value = false_claims([*pools[lr].values()], n, test == "paired", draws, rng)
        add(f"lr={lr} against itself called different, {n} seeds, {test}", "5%", value)
    for lr, n in itertools.product(LRS, (3, 5)):
        value = coverage([*pools[lr].values()], n, draws, rng)
        add(f"interval of the mean of lr={lr} covers it, {n} seeds", "95%", value)
    for lr, test in itertools.product(LRS, ("paired", "Welch")):
        theory, value = found_shifts([*pools[lr].values()], 5, test == "paired", draws, rng)
        add(f"two deviations of lr={lr} found, 5 seeds, {test}", f"{theory:.1%}", value)
    for lr, settings in itertools.product(LRS, (2, 4, 20)):
        pool = [*pools[lr].values()]
        corrected, plain = claims_of_the_best(pool, 5, settings, draws, rng)
        what = f"best of {settings} equal settings claimed, 5 seeds of lr={lr}"
        add(what, "at most 5%", corrected)
        add(f"{what}, without the correction", "more", plain)
    for what, seeds in UNEQUAL.items():
        verdicts, _, covered = unequal_seeds(seeds, 0.0, draws)
        add(f"verdict without a difference, {what}", "at most 5%", verdicts)
        add(f"interval of no difference covers it, {what}", "95%", covered)
        verdicts, wrong, covered = unequal_seeds(seeds, SPREAD, draws)
        add(f"one deviation of the pairs found, {what}", "-", verdicts)
        add(f"the same with the wrong sign, {what}", "at most 0.2%", wrong)
        add(f"interval of one deviation covers it, {what}", "95%", covered)
    for lr in LRS:
        figures[f"skewness of lr={lr}"] = skewness([*pools[lr].values()])
        rows.append([f"skewness of lr={lr}", "0", f"{figures[f'skewness of lr={lr}']:.2f}"])
    both = pairing(pools[LRS[0]], pools[LRS[1]], 5, draws, rng)
    what = f"lr={LRS[0]} against lr={LRS[1]}, 5 common seeds"
    add(f"{what}: width of the paired interval over Welch's", "-", both["width"])
    add(f"{what}: found, paired", "-", both["paired_finds"])
    add(f"{what}: found, Welch", "-", both["welch_finds"])
    rows.append([f"{what}: correlation of the same seed", "-", f"{both['correlation']:.2f}"])
    return rows, {**figures, "correlation": both["correlation"]}


def main() -> None:
    options = parser(__doc__, "report_statistics")
    options.add_argument(
        "--runs", type=Path, help="use the runs of an earlier sweep of this script"
    )
    options.add_argument(
        "--losses", type=Path, help="use the losses in an earlier result of this script"
    )
    options.add_argument(
        "--draws", type=int, default=4000, help="number of draws (default: %(default)s)"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if chosen.losses:
            recorded = json.loads(chosen.losses.read_text())["losses"]
            pools = {float(lr): by_seed for lr, by_seed in recorded.items()}
        else:
            pools = losses(chosen.runs or train(Path(directory)))
    rows, figures = measure(pools, chosen.draws)
    wrong = [value for key, value in figures.items() if "against itself" in key]
    covered = [value for key, value in figures.items() if key.startswith("interval of the mean")]
    ends = tuple(f"seeds of lr={lr}" for lr in LRS)
    claimed = [value for key, value in figures.items() if key.endswith(ends)]
    unequal = [value for key, value in figures.items() if key.startswith("verdict without")]
    wrong_sign = [value for key, value in figures.items() if "the wrong sign" in key]
    readme = [
        (
            "one recipe against itself called different by `report compare`, 3 and 5 seeds",
            f"{min(wrong):.1%} to {max(wrong):.1%} of draws (5%)",
        ),
        (
            "95% interval of the mean of 3 and 5 seeds covers the true one",
            f"{min(covered):.1%} to {max(covered):.1%} of draws",
        ),
        (
            "best of 2, 4 and 20 equal settings of 5 seeds called better by `report compare`",
            f"{min(claimed):.1%} to {max(claimed):.1%} of draws (at most 5%)",
        ),
        (
            "`report compare` of equal settings gives a verdict: 3, 5 and 6 against 3 seeds, and "
            "6 against 6 with 30% missing",
            f"{min(unequal):.1%} to {max(unequal):.1%} of draws (at most 5%)",
        ),
        (
            "the same with a difference of one standard deviation of the pairs: wrong sign",
            f"{min(wrong_sign):.2%} to {max(wrong_sign):.2%} of draws (at most 0.2%)",
        ),
    ]
    results = {"draws": chosen.draws, "figures": figures, "losses": json.loads(json.dumps(pools))}
    report(chosen.out, results, HEADER, rows, readme)


if __name__ == "__main__":
    main()
