"""Simulate the goodput of runs on 1 to 10,000 machines, for three ways of saving.

Goodput is the fraction of time that becomes kept progress.

This is a Monte Carlo simulation. Failures are random. The failure of one machine stops all, and
loses the training since the last durable snapshot. A restart follows, which may fail as well. The
three ways are synchronous saves every 30 minutes, synchronous saves at Young's interval, and
asynchronous saves at Young's interval, as training/saves/save_schedule.py computes it. Each figure
is compared to the expectation that availability.py derives. The script fails if they differ by more
than five standard errors. The same seed gives the same figures.

The time between failures of one machine is from "The Llama 3 Herd of Models" (2024): 419 unexpected
interruptions in 54 days of training on 16,384 GPUs. A single GPU thus fails once in 54 * 16,384 /
419 = 2,112 days or 5.8 years. A machine here has one GPU. With eight it fails eight times as often:
use --mtbf-days 264.

The cost of a snapshot of the 124M model is read from results/snapshots.json if it exists. Otherwise
it is assumed: 1.5 GB of weights and AdamW moments are written, synced and hashed at 0.5 GB/s, and
copied at 10 GB/s during the stall. It takes 30 s to notice a failure, start the processes and load.
Options override these figures. The cost does not grow with the number of machines, because every
machine holds the same state and one of them writes it.

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
    """The times that snapshots and restarts cost, in seconds.

    The defaults are assumptions, which the docstring of the script explains.

    Attributes:
        sync_save_s: Stall of a synchronous save, at whose end the snapshot is durable.
        stall_s: Stall of an asynchronous save, which copies the state.
        durable_s: Time from the start of an asynchronous save until the snapshot is durable.
        restart_s: Time from a failure until training resumes.
    """

    sync_save_s: float = 3.0
    stall_s: float = 0.15
    durable_s: float = 3.5
    restart_s: float = 30.0


@dataclass(frozen=True)
class Way:
    """A way of saving snapshots.

    Attributes:
        name: Name of the way in the table and the figure.
        interval_s: Time between two snapshots. None is Young's interval for the failure rate.
        cost_s: Time for which a snapshot stalls training.
        durable_s: Time from the start of a snapshot until it survives a failure.
    """

    name: str
    interval_s: float | None
    cost_s: float
    durable_s: float

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
    """Read the costs from a file, whose values are numbers or have a median."""
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
    """Simulate the goodput over many failures, and estimate its standard error.

    Args:
        way: The way of saving.
        restart_s: Time from a failure until training resumes.
        mtbf_s: Mean time between failures of the whole run.
        gaps: Times between the failures, in units of their mean.
    """
    interval = way.interval(mtbf_s)
    lives = gaps * mtbf_s
    trained = lives - restart_s  # negative if the restart failed too
    durable = np.floor((trained + way.cost_s - way.durable_s) / (interval + way.cost_s)).clip(min=0)
    progress = durable * interval
    share = progress.sum() / lives.sum()
    error = np.std(progress - share * lives) / lives.mean() / len(lives) ** 0.5
    return float(share), float(error)


def figures(way: Way, restart_s: float, mtbf_s: float, gaps: Any) -> dict[str, float]:
    """Compute the simulated and the expected goodput of a way at one failure rate.

    Exit with an error if they differ too much.
    """
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
    """List numbers of machines that are evenly spaced on a logarithmic axis, and all of TABLE."""
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
        "--svg",
        type=Path,
        default=ROOT / "docs" / "goodput.svg",
        help="file for the figure (default: %(default)s)",
    )
    options.add_argument(
        "--costs",
        type=Path,
        default=RESULTS / "snapshots.json",
        help="file with measured costs (default: %(default)s)",
    )
    for key, value in asdict(Costs()).items():
        name = f"--{key.replace('_', '-')}"
        options.add_argument(
            name,
            type=float,
            metavar="S",
            help=f"seconds, instead of the value in --costs or, without that file, {value:g}",
        )
    help = "mean time between failures of one machine (default: %(default).0f)"
    options.add_argument("--mtbf-days", type=float, default=MTBF_DAYS, metavar="DAYS", help=help)
    options.add_argument(
        "--fixed-minutes",
        type=float,
        default=30,
        help="fixed interval of the first way (default: %(default)s)",
    )
    options.add_argument(
        "--machines",
        type=int,
        default=10_000,
        help="largest number of machines (default: %(default)s)",
    )
    options.add_argument(
        "--failures",
        type=int,
        default=200_000,
        help="number of simulated failures for each figure (default: %(default)s)",
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
    # All ways have the same failures.
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
