"""Measure the training steps and seconds until a sweep has a job near the best loss of a grid.

A grid over the learning rate and dropout is compared to searches of the same ranges with as many
trials: at random and by TPE, without and with ASHA. Jobs run one after another, with one thread.
Each of three seeds decides the draws of a search, and the order of the grid's values. A job counts
when it is complete. The steps of pruned jobs count, too. The target is a loss at most 0.5% above
the grid's best. The steps are the same in every run of this script on a machine, but the seconds
are not.

The script draws the best loss so far, over steps and seconds, into docs/sweep-search.png.

    python benchmarks/sweep_search.py
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from common import ROOT, corpus_path, log, parser, report, timed

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

NEAR = 1.005  # the target, in units of the grid's best loss
LRS = ("5e-3", "1e-2", "2e-2", "4e-2", "8e-2")
DROPOUTS = ("0", "0.05", "0.1", "0.2")
RUN = [
    "experiment=shakespeare_char_cpu",
    "model=modern_nano",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "data.block_size=32",
    "trainer.precision=fp32",
    "trainer.max_steps=180",
    "trainer.eval_every=20",
    "trainer.eval_steps=10",
    "optimizer.warmup_steps=10",
    "trainer.sample_every=null",
    "tracker=[]",
]
SPACE = [
    f"optimizer.lr=tag(log,interval({LRS[0]},{LRS[-1]}))",
    f"model.dropout=choice({','.join(DROPOUTS)})",
]
# The overrides of each way, without the values that it draws. A grid has no sampler.
WAYS = {
    "grid": [],
    "random": ["sweep.sampler=random"],
    "TPE": ["sweep.sampler=tpe"],
    "TPE, ASHA": ["sweep.sampler=tpe", "sweep.pruner=asha"],
}
COLOURS = dict(zip(WAYS, ("#24292f", "#2f9e44", "#8fb3d9", "#c2410c"), strict=True))
GRID_LINES = "#e5e7eb"
HEADER = [
    "way",
    "jobs, to the target",
    "steps, to the target",
    "seconds, to the target",
    "steps, in all",
    "seconds, in all",
    "best loss",
]


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Attributes:
        steps: Number of steps that all jobs had taken by then.
        seconds: Seconds since the command began.
        loss: Validation loss of the job, or None if it was pruned.
    """

    steps: int
    seconds: float
    loss: float | None


def values(way: str, seed: int) -> list[str]:
    """Build the overrides that define the jobs of a sweep."""
    if way != "grid":
        jobs = len(LRS) * len(DROPOUTS)
        return [*SPACE, f"sweep.trials={jobs}", f"sweep.seed={seed}"]
    shuffled = random.Random(seed)
    lrs = shuffled.sample(LRS, len(LRS))
    dropouts = shuffled.sample(DROPOUTS, len(DROPOUTS))
    return [f"optimizer.lr={','.join(lrs)}", f"model.dropout={','.join(dropouts)}"]


def ended_jobs(directory: Path, begun: float) -> list[Ended]:
    """Read the ends of a sweep's jobs, in their order.

    Args:
        directory: Directory of the sweep.
        begun: Time at which the command began, by time.time().
    """
    steps = 0
    ended = []
    for path in sorted(directory.glob("*/result.json"), key=lambda each: each.stat().st_mtime_ns):
        result = json.loads(path.read_text())
        steps += result["step"]
        seconds = round(path.stat().st_mtime - begun, 2)
        loss = result["val_loss"] if result["status"] == "complete" else None
        ended.append(Ended(steps, seconds, loss))
    return ended


def sweep(way: str, seed: int) -> list[Ended]:
    command = [
        sys.executable,
        str(ROOT / "main.py"),
        "-m",
        "run.name=sweep",
        *RUN,
        f"data.path={corpus_path()}",
        *WAYS[way],
        *values(way, seed),
    ]
    with tempfile.TemporaryDirectory() as directory:
        begun = time.time()
        timed(command, Path(directory))
        jobs = ended_jobs(Path(directory, "outputs", "sweep"), begun)
    log(f"{way}, seed {seed}: {jobs[-1].steps} steps, {jobs[-1].seconds:.0f} s, {best(jobs):.4f}")
    return jobs


def best(jobs: list[Ended]) -> float:
    """Return the lowest loss of a complete job."""
    return min((each.loss for each in jobs if each.loss is not None), default=math.inf)


def first_within(jobs: list[Ended], target: float) -> int | None:
    """Count the jobs until the target was reached. Return None if it was not."""
    for number, job in enumerate(jobs, 1):
        if job.loss is not None and job.loss <= target:
            return number
    return None


def row(way: str, sweeps: list[list[Ended]], target: float) -> list[str]:
    """Write a row of the table, with a figure for each seed."""
    counts = [first_within(jobs, target) for jobs in sweeps]
    hits = [jobs[n - 1] if n else None for jobs, n in zip(sweeps, counts, strict=True)]
    return [
        way,
        ", ".join(str(count or "never") for count in counts),
        ", ".join(f"{hit.steps:,}" if hit else "never" for hit in hits),
        ", ".join(f"{hit.seconds:.0f}" if hit else "never" for hit in hits),
        ", ".join(f"{jobs[-1].steps:,}" for jobs in sweeps),
        ", ".join(f"{jobs[-1].seconds:.0f}" for jobs in sweeps),
        ", ".join(f"{best(jobs):.4f}" for jobs in sweeps),
    ]


def readme(rows: list[list[str]], jobs: int) -> list[tuple[str, str]]:
    what = (
        f"steps until a job is within 0.5% of the best loss of a grid of {jobs} jobs, "
        "learning rate and dropout, three seeds ([plot](docs/sweep-search.png))"
    )
    steps = "; ".join(f"{way}: {to_target}" for way, _, to_target, *_ in rows)
    whole = "; ".join(f"{way}: {in_all}" for way, _, _, _, in_all, *_ in rows)
    return [(what, steps), ("steps of all jobs of these sweeps", whole)]


def best_so_far(jobs: list[Ended], axis: str) -> tuple[list[float], list[float]]:
    """List the points at which the best loss changes, and the end of the curve."""
    xs, losses = [], []
    lowest = math.inf
    for job in jobs:
        if job.loss is None or job.loss >= lowest:
            continue
        lowest = job.loss
        xs.append(float(getattr(job, axis)))
        losses.append(lowest)
    return [*xs, float(getattr(jobs[-1], axis))], [*losses, lowest]


def draw_axes(
    axes: Axes, sweeps: dict[str, list[list[Ended]]], axis: str, target: float, top: float
) -> None:
    for way, of_seeds in sweeps.items():
        for number, jobs in enumerate(of_seeds):
            label = way if number == 0 else None
            points = best_so_far(jobs, axis)
            axes.step(*points, where="post", color=COLOURS[way], linewidth=1.4, label=label)
            axes.plot(points[0][-1], points[1][-1], "o", color=COLOURS[way], markersize=4)
    axes.axhline(target, color="#8b949e", linewidth=1, linestyle="--")
    axes.set_ylim(target / NEAR * 0.99, top)
    axes.set_xlim(0, None)
    axes.set_xlabel({"steps": "training steps of all jobs", "seconds": "seconds"}[axis])
    axes.grid(color=GRID_LINES, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(sweeps: dict[str, list[list[Ended]]], target: float, out: Path) -> None:
    figure, both = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    top = target * 1.08
    for axes, axis in zip(both, ("steps", "seconds"), strict=True):
        draw_axes(axes, sweeps, axis, target, top)
    both[0].set_ylabel("best validation loss so far, nats")
    both[0].annotate(
        "0.5% above the grid's best", (0, target), (4, 3), textcoords="offset points", fontsize=8
    )
    both[1].legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, "sweep_search")
    options.add_argument(
        "--seeds", type=int, default=3, help="number of seeds (default: %(default)s)"
    )
    options.add_argument(
        "--picture",
        type=Path,
        default=ROOT / "docs" / "sweep-search.png",
        help="file for the figure (default: %(default)s)",
    )
    chosen = options.parse_args()
    sweeps: dict[str, list[list[Ended]]] = {way: [] for way in WAYS}
    for seed in range(1, chosen.seeds + 1):
        for way, of_seeds in sweeps.items():
            of_seeds.append(sweep(way, seed))
    lowest = {best(jobs) for jobs in sweeps["grid"]}
    if len(lowest) > 1:
        sys.exit(f"the same grid has several best losses, {lowest}: training is not repeatable")
    target = NEAR * lowest.pop()
    rows = [row(way, of_seeds, target) for way, of_seeds in sweeps.items()]
    plain: dict[str, Any] = {
        way: [[asdict(job) for job in jobs] for jobs in of_seeds]
        for way, of_seeds in sweeps.items()
    }
    results = {"target": target, "ways": plain}
    report(chosen.out, results, HEADER, rows, readme(rows, len(sweeps["grid"][0])))
    draw(sweeps, target, chosen.picture)


if __name__ == "__main__":
    main()
