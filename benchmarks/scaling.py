"""Measure how the time and the memory of a step grow with each size of a training run.

The sizes are layers, width, context, batch, corpus and ranks. One of them varies, while the others
keep their base values: 4 layers, width 128, heads of 32, context 64, batch 12, 1.1 million
characters, and one rank with one thread. The model is `gpt` with AdamW in fp32 on the CPU, as
`main.py` trains it. The steps are timed from outside, after a warm-up. Time is the CPU time of all
ranks divided by their number, which is robust to other load. Memory is the peak resident memory of
all processes. A constant plus a power law is fitted to each series, with the theoretical exponent
if there is one. The figure shows it with a lower bound for any implementation in fp32:

* time: the FLOPs (6 N + 12 L C T per character) divided by the rate at which this machine
  multiplies matrices; and the bytes of the weights, gradients, moments and the backward pass's
  inputs, divided by the rate at which it copies memory
* memory: the memory of the imports, and the same bytes

    python benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from common import ROOT, alternate, corpus_path, parser, report, spread
from fits import Law, fit
from limits import HEAD, Point, describe, limits, needed
from stopwatch import Pace, pace
from trainers import OURS, PLAIN_FP32, Setting, ours

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

HEADER = [
    "against",
    "from .. to",
    "a step, ms",
    "its law",
    "memory, MB",
    "its law",
    "of the matmul rate",
]
LIMIT_BYTES = 60_000
INK, GRID = "#24292f", "#e5e7eb"
POINTS, LINE = "#c2410c", "#8fb3d9"
FLOPS, BYTES = "#15803d", "#7c3aed"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scaling",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # a single font: matplotlib writes the list into every text
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
}
SPAN_S = 1.5  # the timed steps of a point should take this much CPU time
ASSUMED_FLOPS = 5e10  # FLOP/s from which their number is computed


@dataclass(frozen=True)
class Sweep:
    """The values of a size, and the theoretical exponents of its laws.

    An exponent of None is fitted.
    """

    values: tuple[int, ...]
    time_exponent: float | None
    memory_exponent: float | None


SWEEPS = {
    "layers": Sweep((1, 2, 4, 8, 16), 1, 1),
    "width": Sweep((64, 128, 256, 512), None, None),
    "context": Sweep((32, 64, 128, 256, 512), None, None),
    "batch": Sweep((3, 6, 12, 24, 48), 1, 1),
    "corpus": Sweep((250_000, 1_000_000, 4_000_000, 16_000_000), 1, 1),
    "ranks": Sweep((1, 2, 3), -1, 1),
}


def corpus_of(characters: int, scratch: Path) -> Path:
    """Write tinyshakespeare to a file, repeated to this number of characters."""
    path = scratch / f"text-{characters}.txt"
    if not path.exists():
        text = corpus_path().read_text(encoding="utf-8")
        path.write_text((text * (characters // len(text) + 1))[:characters], encoding="utf-8")
    return path


def measure(point: Point, scratch: Path) -> Pace:
    flops = needed(point).flops * point.ranks
    timed = max(4, min(200, round(SPAN_S * ASSUMED_FLOPS / flops)))
    shape = {
        "context": point.context,
        "batch": point.batch,
        "warmup": 3,
        "timed": timed,
        "log_every": 1,
    }
    setting = Setting(point.layers, point.width // HEAD, point.width, **shape)
    command = ours(
        setting, corpus_of(point.corpus, scratch), scratch, [*PLAIN_FP32, "data.sha256=null"]
    )
    workers = [f"ddp.nproc_per_node={point.ranks}"] if point.ranks > 1 else []
    return pace([*command, *workers], scratch, OURS, setting.span)


def points_of(name: str) -> dict[str, Point]:
    return {str(value): replace(Point(), **{name: value}) for value in SWEEPS[name].values}


def run_sweep(name: str, repetitions: int, scratch: Path) -> dict[str, Any]:
    sweep, points = SWEEPS[name], points_of(name)
    candidates = {key: partial(measure, point, scratch) for key, point in points.items()}
    paces = alternate(f"{name}, a step", candidates, repetitions)
    times = [[1e3 * run.cpu_s / points[key].ranks for run in runs] for key, runs in paces.items()]
    walls = [[1e3 * run.wall_s for run in runs] for runs in paces.values()]
    memory = [[run.peak_mb for run in runs] for runs in paces.values()]
    laws = {
        "time": fit(sweep.values, [median(one) for one in times], sweep.time_exponent),
        "memory": fit(sweep.values, [median(one) for one in memory], sweep.memory_exponent),
    }
    return {
        "values": list(sweep.values),
        "cpu_ms": [spread(one) for one in times],
        "wall_ms": [spread(one) for one in walls],
        "memory_mb": [spread(one) for one in memory],
        "laws": {kind: asdict(law) for kind, law in laws.items()},
    }


def format_law(law: dict[str, float], name: str, unit: str) -> str:
    """Format a law, for example as `3.1 ms + 2.2 ms x layers^1`. Terms that are 0 are left out."""
    power = f" x {name}" if law["exponent"] == 1 else f" x {name}^{law['exponent']:.3g}"
    terms = [f"{law['constant']:.3g} {unit}"] * (law["constant"] > 0)
    terms += [f"{law['factor']:.3g} {unit}{power}"] * (law["factor"] > 0)
    return " + ".join(terms)


def draw(out: Path, sweeps: dict[str, Any], caption: str) -> None:
    with plt.rc_context(STYLE):
        figure, rows = plt.subplots(
            2,
            len(sweeps),
            figsize=(2.2 * len(sweeps), 5.2),
            layout="constrained",
            facecolor="white",
            squeeze=False,
        )
        for (name, sweep), axes in zip(sweeps.items(), rows.T, strict=True):
            time = {
                "FLOPs / matmul rate": ("flops_ms", FLOPS),
                "bytes / bandwidth": ("bytes_ms", BYTES),
            }
            panel(axes[0], sweep, "cpu_ms", "time", time)
            panel(
                axes[1], sweep, "memory_mb", "memory", {"imports + bytes held": ("held_mb", BYTES)}
            )
            axes[0].set_yscale("log")
            axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes[0].yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
            axes[0].yaxis.set_minor_locator(NullLocator())
            axes[1].set_ylim(bottom=0)
            axes[1].yaxis.set_major_locator(MaxNLocator(4))
            for cost, kind, unit in zip(axes, ("time", "memory"), ("ms", "MB"), strict=True):
                cost.set_title(
                    format_law(sweep["laws"][kind], name, unit).replace(" + ", " +\n"),
                    fontsize=8,
                    loc="left",
                )
            axes[1].set_xlabel(name)
        rows[0][0].set_ylabel("ms of a step")
        rows[1][0].set_ylabel("MB, all ranks")
        lines = {line.get_label(): line for row in rows for line in row[0].get_lines()}
        figure.legend(
            handles=list(lines.values()),
            loc="outside upper left",
            ncols=len(lines),
            frameon=False,
            fontsize=8,
        )
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8)
        drawing = StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(compact_svg(drawing.getvalue()), encoding="utf-8")


def compact_svg(svg: str) -> str:
    """Make an SVG a third smaller, without indentation, rotations by 0 and third decimals."""
    for pattern, instead in (
        (r"\n *", "\n"),
        (r' transform="rotate\(-0 [^"]*"', ""),
        (r"(\.\d\d)\d+", r"\1"),
    ):
        svg = re.sub(pattern, instead, svg)
    return svg


def panel(
    axes: Any, sweep: dict[str, Any], measured: str, law: str, floors: dict[str, tuple[str, str]]
) -> None:
    """Draw the points of a series, their law and the lower bounds."""
    xs, fitted = sweep["values"], Law(**sweep["laws"][law])
    axes.plot(
        curve := np.geomspace(xs[0], xs[-1], 12),
        fitted(curve),
        color=LINE,
        linewidth=2,
        label="fit",
    )
    axes.plot(
        xs,
        [one["median"] for one in sweep[measured]],
        "o",
        color=POINTS,
        markersize=4,
        label="measured",
    )
    for label, (key, color) in floors.items():
        axes.plot(
            xs,
            [limit[key] for limit in sweep["limits"]],
            "--",
            color=color,
            linewidth=1,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_xticks(xs, [f"{x / 1e6:g}M" if x >= 100_000 else f"{x:g}" for x in xs])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(which="both", left=False, bottom=False)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def shares(sweep: dict[str, Any]) -> list[float]:
    """Compute the share of the matmul rate that each point reaches."""
    return [
        limit["flops_ms"] / ms["median"]
        for limit, ms in zip(sweep["limits"], sweep["cpu_ms"], strict=True)
    ]


def table(sweeps: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, sweep in sweeps.items():
        row = [name, " .. ".join(f"{sweep['values'][i]:,}" for i in (0, -1))]
        for key, kind, unit in (("cpu_ms", "time", "ms"), ("memory_mb", "memory", "MB")):
            row += [
                " .. ".join(f"{sweep[key][i]['median']:.3g}" for i in (0, -1)),
                format_law(sweep["laws"][kind], name, unit),
            ]
        rows.append([*row, " .. ".join(f"{shares(sweep)[i]:.0%}" for i in (0, -1))])
    return rows


def readme(sweeps: dict[str, Any]) -> list[tuple[str, str]]:
    times = [
        format_law(sweep["laws"]["time"], name, "ms")
        for name, sweep in sweeps.items()
        if name not in ("corpus", "ranks")
    ]
    what = "CPU time of a step of `gpt` in fp32 as each of its sizes grows"
    rows = [(f"{what} ([plot](docs/scaling.svg))", "; ".join(times))]
    if "corpus" in sweeps:
        xs, ms = sweeps["corpus"]["values"], [one["median"] for one in sweeps["corpus"]["cpu_ms"]]
        what = f"CPU time of that step with a corpus of {xs[-1]:,} characters instead of {xs[0]:,}"
        rows.append((what, f"{ms[-1] / ms[0]:.2f} times"))
    return rows


def command_line() -> argparse.Namespace:
    options = parser(__doc__, "scaling")
    options.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    options.add_argument(
        "--repetitions", type=int, default=2, help="runs of each point (default: %(default)s)"
    )
    options.add_argument(
        "--svg",
        type=Path,
        default=ROOT / "docs" / "scaling.svg",
        help="file for the figure (default: %(default)s)",
    )
    return options.parse_args()


def main() -> None:
    chosen = command_line()
    machine, sweeps = describe(), {}
    with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
        for name in chosen.sweeps:
            sweeps[name] = run_sweep(name, chosen.repetitions, Path(scratch))
            machine = machine.or_better(describe())
    for name, sweep in sweeps.items():
        sweep["limits"] = [limits(point, machine) for point in points_of(name).values()]
    base = "{layers} layers, {width} wide, context {context}, batch {batch}, {ranks} rank".format(
        **asdict(Point())
    )
    rates = f"{machine.flops_per_s / 1e9:.0f} GFLOP/s a core, {machine.bytes_per_s / 1e9:.0f} GB/s"
    caption = (
        f"{base}, but for what grows; CPU time of a rank. Limits: matrices and memory "
        f"as measured here, {rates}."
    )
    results = {"base": asdict(Point()), "limits": asdict(machine), "sweeps": sweeps}
    report(chosen.out, results, HEADER, table(sweeps), readme(sweeps))
    draw(chosen.svg, sweeps, caption)
    if (size := chosen.svg.stat().st_size) > LIMIT_BYTES:
        sys.exit(f"{chosen.svg} has {size / 1e3:.0f} kB, more than {LIMIT_BYTES / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
