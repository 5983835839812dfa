"""Goodput by number of machines, for three ways of saving.

Goodput is the fraction of time that becomes kept progress.

A Monte Carlo simulation: failures are random, the failure of one machine stops all, loses the
training since the last durable snapshot, and is followed by a restart, which may fail as well. It
compares synchronous saves every 30 minutes, synchronous saves at Young's interval, and asynchronous
saves at Young's interval, as training/saves/save_schedule.py computes it. Each figure is
checked against the expectation that availability.py derives; the script fails if they differ by
more than five standard errors. The same seed gives the same figures.

The time between failures of one machine follows from "The Llama 3 Herd of Models" (2024): 419
unexpected interruptions in 54 days of training on 16,384 GPUs, for each GPU one in 54 * 16,384 /
419 = 2,112 days or 5.8 years. A machine here has one GPU; with eight it fails eight times as often:
--mtbf-days 264.

The cost of a snapshot of the 124M model is read from results/snapshots.json if it exists. Otherwise
the figures are assumed: 1.5 GB of weights and AdamW moments, written, synced and hashed at 0.5
GB/s; a stall to copy them at 10 GB/s; 30 s to notice a failure, start the processes and load. An
option overrides either. The cost does not grow with the number of machines: every machine holds the
same state, and one of them writes it.

    python benchmarks/goodput.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from availability import goodput
from common import RESULTS, ROOT, log, parser, report

from mingpt_ddp.training.saves.save_schedule import young_interval

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

DAY = 86_400.0
MTBF_DAYS = 54 * 16_384 / 419
STANDARD_ERRORS = 5
TABLE = (1, 10, 100, 1_000, 10_000)  # numbers of machines to print
INK, GRID = "#24292f", "#e5e7eb"
COLORS = ("#6b7280", "#1d4ed8", "#c2410c")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "goodput",
    "font.family": "sans-serif",
}
STYLE |= {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
STYLE |= {"axes.edgecolor": GRID}


@dataclass(frozen=True)
class Costs:
    """Seconds; the defaults are the assumptions that the script's docstring explains."""

    sync_save_s: float = 3.0  # stall of a synchronous save, until it is durable
    stall_s: float = 0.15  # stall of an asynchronous save, for staging
    durable_s: float = 3.5  # from the start of staging until the snapshot is durable
    restart_s: float = 30.0  # from a failure until training resumes


@dataclass(frozen=True)
class Way:
    """One way of saving."""

    name: str
    interval_s: float | None  # None: optimal for the failure rate
    cost_s: float  # the stall
    durable_s: float  # until the snapshot survives a failure

    def interval(self, mtbf_s: float) -> float:
        if self.interval_s is not None:
            return self.interval_s
        return max(young_interval(self.cost_s, mtbf_s), self.durable_s)


def ways(costs: Costs, fixed_minutes: float) -> list[Way]:
    wait, asynchronous = costs.sync_save_s, (costs.stall_s, costs.durable_s)
    return [
        Way(f"training waits, every {fixed_minutes:g} minutes", 60 * fixed_minutes, wait, wait),
        Way("training waits, at Young's interval", None, wait, wait),
        Way("in the background, at Young's interval", None, *asynchronous),
    ]


def measured(path: Path) -> dict[str, float]:
    """Return the costs in a file: numbers, or medians of repetitions."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    missing = asdict(Costs()).keys() - found.keys()
    if missing:
        sys.exit(f"{path} lacks {', '.join(sorted(missing))}")
    values = {key: found[key] for key in asdict(Costs())}
    return {
        key: float(value["median"] if isinstance(value, dict) else value)
        for key, value in values.items()
    }


def simulate(way: Way, restart_s: float, mtbf_s: float, gaps: Any) -> tuple[float, float]:
    """Return the goodput over failures, and its standard error.

    Args:
        gaps: between the failures, in units of their mean.
    """
    interval = way.interval(mtbf_s)
    lives = gaps * mtbf_s
    trained = lives - restart_s  # negative: the restart failed
    durable = np.floor((trained + way.cost_s - way.durable_s) / (interval + way.cost_s)).clip(min=0)
    progress = durable * interval
    share = progress.sum() / lives.sum()
    error = np.std(progress - share * lives) / lives.mean() / len(lives) ** 0.5
    return float(share), float(error)


def figures(way: Way, restart_s: float, mtbf_s: float, gaps: Any) -> dict[str, float]:
    """Return one way's simulated and expected goodput at a failure rate; exit if they differ."""
    interval = way.interval(mtbf_s)
    simulated, error = simulate(way, restart_s, mtbf_s, gaps)
    expected = goodput(interval, way.cost_s, way.durable_s, restart_s, mtbf_s)
    if abs(simulated - expected) > STANDARD_ERRORS * error + 1e-9:
        sys.exit(
            f"{way.name}, MTBF {mtbf_s:.0f} s: simulated {simulated:.5%} +- {error:.5%}, "
            f"expected {expected:.5%}"
        )
    values = {
        "interval_s": interval,
        "simulated": simulated,
        "standard_error": error,
        "expected": expected,
    }
    return {key: float(f"{value:.6g}") for key, value in values.items()}


def log_grid(most: int, per_decade: int = 8) -> list[int]:
    """Return numbers of machines, evenly spaced on a logarithmic axis, plus those of the table."""
    points = np.geomspace(1, most, max(2, round(per_decade * np.log10(most)) + 1))
    return sorted({*(round(float(n)) for n in points), *(n for n in TABLE if n <= most)})


def draw(out: Path, machines: list[int], curves: dict[str, list[float]], caption: str) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained", facecolor="white")
        for color, (name, shares) in zip(COLORS, curves.items(), strict=True):
            axes.plot(
                machines,
                [100 * share for share in shares],
                color=color,
                linewidth=2,
                clip_on=False,
                label=name,
            )
            label: dict[str, Any] = {
                "va": "center",
                "color": color,
                "fontsize": 10,
                "annotation_clip": False,
            }
            axes.annotate(
                f"{shares[-1]:.1%}",
                (machines[-1], 100 * shares[-1]),
                (6, 0),
                textcoords="offset points",
                **label,
            )
        axes.set_xscale("log")
        axes.set_xlim(machines[0], machines[-1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:g}%"))
        axes.set_ylim(top=100)
        axes.set_xlabel("machines")
        axes.set_ylabel("goodput")
        axes.set_title("Share of the time that becomes lasting progress", fontsize=11, loc="left")
        axes.grid(color=GRID, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8.5)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def caption(costs: Costs, origin: str, mtbf_days: float) -> str:
    return (
        f"Simulated. A machine fails once in {mtbf_days:,.0f} days. "
        f"For each snapshot training waits {costs.sync_save_s:.3g} s; "
        f"with writing in the background\n{costs.stall_s:.3g} s, "
        f"and it is durable after {costs.durable_s:.3g} s. "
        f"A restart takes {costs.restart_s:.3g} s. These four times are {origin}."
    )


def command_line() -> argparse.Namespace:
    options = parser(__doc__, "goodput")
    options.add_argument(
        "--svg", type=Path, default=ROOT / "docs" / "goodput.svg", help="default: %(default)s"
    )
    options.add_argument(
        "--costs", type=Path, default=RESULTS / "snapshots.json", help="default: %(default)s"
    )
    for key, value in asdict(Costs()).items():
        name = f"--{key.replace('_', '-')}"
        options.add_argument(
            name,
            type=float,
            metavar="S",
            help=f"overrides --costs, without which it is {value:g} s",
        )
    help = "of one machine (default: %(default).0f)"
    options.add_argument("--mtbf-days", type=float, default=MTBF_DAYS, metavar="DAYS", help=help)
    options.add_argument("--fixed-minutes", type=float, default=30, help="default: %(default)s")
    options.add_argument(
        "--machines", type=int, default=10_000, help="at most (default: %(default)s)"
    )
    options.add_argument(
        "--failures",
        type=int,
        default=200_000,
        help="simulated for each figure (default: %(default)s)",
    )
    options.add_argument("--seed", type=int, default=0)
    return options.parse_args()


def main() -> None:
    chosen = command_line()
    known = measured(chosen.costs)
    given = {
        key: getattr(chosen, key) for key in asdict(Costs()) if getattr(chosen, key) is not None
    }
    costs = Costs(**(known | given))
    origin = ("measured" if known else "assumed, not measured") + (
        f", but for {', '.join(given)}" if given else ""
    )
    machines = log_grid(chosen.machines)
    # the same failures for all ways
    gaps = np.random.default_rng(chosen.seed).exponential(size=chosen.failures)
    compared = ways(costs, chosen.fixed_minutes)
    results: dict[str, list[dict[str, float]]] = {}
    for way in compared:
        log(way.name)
        mtbfs = [chosen.mtbf_days * DAY / n for n in machines]
        results[way.name] = [figures(way, costs.restart_s, mtbf, gaps) for mtbf in mtbfs]
    curves = {name: [point["simulated"] for point in points] for name, points in results.items()}
    draw(chosen.svg, machines, curves, caption(costs, origin, chosen.mtbf_days))
    rows = [
        [
            f"{n:,}",
            *(
                f"{points[i]['simulated']:.3%} ({points[i]['interval_s']:,.0f} s)"
                for points in results.values()
            ),
        ]
        for i, n in enumerate(machines)
        if n in TABLE
    ]
    settings = {"mtbf_days": chosen.mtbf_days, "seed": chosen.seed, "failures": chosen.failures}
    settings |= {"costs": asdict(costs), "costs_are": origin}
    report(
        chosen.out, {**settings, "machines": machines, "ways": results}, ["machines", *curves], rows
    )


if __name__ == "__main__":
    main()
