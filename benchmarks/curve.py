"""Draw the training curve of a run.

The training loss is a thin line, validation losses are points with their values. Reads the
TensorBoard events of rank 0 and the configuration from a run directory, and writes a small SVG with
selectable text. Needs matplotlib (`pip install -e .[dev]`).

    python benchmarks/curve.py outputs/RUN
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import yaml
from common import ROOT, log

matplotlib.use("svg")
from matplotlib import pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LIMIT_BYTES = 60_000
MOST_POINTS = 1_000  # of the line; more are not visible
LABELS = 9  # labelled validation losses, at most
INK, LINE, POINTS, GRID = "#24292f", "#8fb3d9", "#c2410c", "#e5e7eb"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "curve",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
}

Series = tuple[list[int], list[float]]


def read(run: Path, tag: str) -> Series:
    """Return steps and values; those of the last attempt for steps trained more than once."""
    directory = run / "tensorboard" / "rank0"
    if not directory.is_dir():
        sys.exit(f"there is no {directory}; name a run directory instead of {run}")
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        sys.exit(f"{directory} has no {tag}; train the run further")
    values = {event.step: event.value for event in events.Scalars(tag)}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def thinned(series: Series, most: int) -> Series:
    """Return every n-th point and the last."""
    steps, values = series
    every = -(-len(steps) // most)
    kept = sorted({*range(0, len(steps), every), len(steps) - 1})
    return [steps[i] for i in kept], [values[i] for i in kept]


def title(run: Path) -> str:
    config: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    model, data, trainer = config["model"], config["data"], config["trainer"]
    shape = (
        f"{model['n_layer']} layers, {model['n_head']} heads, {model['n_embd']} wide, "
        f"context {data['block_size']}"
    )
    return f"{model['name']} on {data['name']}: {shape}, batch {trainer['batch_size']}"


def draw(run: Path, out: Path, log_x: bool) -> None:
    train, val = thinned(read(run, "train/loss"), MOST_POINTS), read(run, "val/loss")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained", facecolor="white")
        axes.plot(*train, color=LINE, linewidth=1, label="training")
        axes.plot(*val, "o", color=POINTS, markersize=5, label="validation, the whole split")
        # points: above or below, away from the line
        outside = 10 if val[1][-1] >= mean(train[1][-10:]) else -16
        label: dict[str, Any] = {
            "ha": "center",
            "color": POINTS,
            "bbox": {"facecolor": "white", "linewidth": 0, "pad": 0.5, "alpha": 0.8},
        }
        for step, loss in zip(*thinned(val, LABELS - 1), strict=True):
            axes.annotate(
                f"{loss:.3f}", (step, loss), (0, outside), textcoords="offset points", **label
            )
        if log_x:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, 1.05 * max(train[0][-1], val[0][-1]))
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per character")
        axes.set_title(title(run), fontsize=11, loc="left")
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("run", type=Path, help="a run directory")
    options.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs" / "training-curve.svg",
        help="default: %(default)s",
    )
    options.add_argument("--log-x", action="store_true", help="steps on a logarithmic axis")
    chosen = options.parse_args()
    draw(chosen.run, chosen.out, chosen.log_x)
    size = chosen.out.stat().st_size
    log(f"{chosen.out}: {size / 1e3:.1f} kB")
    if size > LIMIT_BYTES:
        sys.exit(f"that is more than {LIMIT_BYTES / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
