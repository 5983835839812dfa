"""Measure the overhead of a job of a sweep, compared to the same run started alone.

The same short run with different seeds is started alone, and as the jobs of a sweep, in each way of
launching one. The wall seconds and the CPU seconds of all processes are divided by the number of
jobs. CPU seconds depend less on other load. The pause between two jobs lasts from the result of a
job until the next job in its place has done its first step. A sweep whose jobs are all complete
shows the cost of skipping a job.

    python benchmarks/sweep_overhead.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, alternate, cell, compare, parser, report, spread, timed

RUN = (
    "model=gpt_nano model.n_layer=2 model.n_embd=24 data.block_size=16 data.truncate=0.02 "
    "trainer.max_epochs=null"
)
RUN += " trainer.max_steps=20 trainer.eval_every=10 trainer.batch_size=12 optimizer.warmup_steps=2"
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    str(ROOT / "main.py"),
]
PYTHON = [sys.executable, str(ROOT / "main.py")]
TWO = "sweep.parallel=2"
FIRST_STEP = re.compile(r"^(\S+ \S+) .*the first step was done", re.MULTILINE)
# For each way, the command of a single run and the command of a sweep.
WAYS = {
    "two ranks, lock-step (`torchrun main.py -m`)": (TORCHRUN, [*TORCHRUN, "-m"]),
    "two ranks, workers for each job (`ddp.nproc_per_node=2 -m`)": (
        [*PYTHON, "ddp.nproc_per_node=2"],
        [*PYTHON, "-m", "ddp.nproc_per_node=2"],
    ),
    "one rank, in one process (`python main.py -m`)": (PYTHON, [*PYTHON, "-m"]),
    f"one rank, two jobs at a time (`python main.py -m {TWO}`)": (PYTHON, [*PYTHON, "-m", TWO]),
}
HEADER = [
    "way",
    "alone: s, CPU s",
    "a job of a sweep: s, CPU s",
    "job / alone, by CPU time",
    "between two jobs: s",
    "skipping a job: s",
]


def spend(command: list[str], cwd: Path) -> tuple[float, float]:
    """Measure the wall and CPU seconds of a command that trains RUN."""
    wall, cpu = timed([*command, *RUN.split()], cwd)
    return float(f"{wall:.4g}"), float(f"{cpu:.4g}")


def alone(command: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        wall, cpu = spend([*command, "run.seed=0"], Path(directory))
    return {"wall": wall, "cpu": cpu}


def in_a_sweep(command: list[str], jobs: int) -> dict[str, float]:
    words = [*command, "run.name=sweep", f"run.seed=range({jobs})"]
    with tempfile.TemporaryDirectory() as directory:
        wall, cpu = spend(words, Path(directory))
        pause = between_jobs(Path(directory, "outputs", "sweep"), 2 if TWO in command else 1)
        again, _ = spend(words, Path(directory))
        start, _ = spend([*words, "run.seed=0"], Path(directory))  # skips one job
    skip = max(0.0, again - start) / (jobs - 1)
    return {"wall": wall / jobs, "cpu": cpu / jobs, "between": pause, "skip": skip}


def between_jobs(directory: Path, places: int) -> float:
    """Compute the median seconds from the result of a job to the first step of the next job.

    Args:
        directory: Directory of the sweep.
        places: Number of concurrent jobs. A new job takes the place of the first one that ends.
    """
    ends = sorted(path.stat().st_mtime for path in directory.glob("*/result.json"))
    first_steps = sorted(map(first_step, directory.glob("*/main.rank0.log")))
    pairs = zip(first_steps[places:], ends[:-places], strict=True)
    return median(after - before for after, before in pairs)


def first_step(path: Path) -> float:
    """Read the time at which a job had done its first step, in seconds since 1970."""
    found = FIRST_STEP.search(path.read_text())
    assert found is not None, path
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def readme(ways: dict[str, Any]) -> list[tuple[str, str]]:
    what = "a job of a sweep against the same run started alone, by CPU time"
    order = "lock-step, workers for each job, in one process, two at a time"
    job = ", ".join(f"{way['cpu_ratio']['median']:.2f}" for way in ways.values())
    pause = ", ".join(f"{way['sweep']['between']['median']:.2f}" for way in ways.values())
    done = ", ".join(f"{way['sweep']['skip']['median']:.2f}" for way in ways.values())
    return [
        (f"{what}: {order}", f"{job} times"),
        (
            "from the result of a job to the first step of the next, same order of ways",
            f"{pause} s",
        ),
        ("a job that is done already, same order of ways", f"{done} s"),
    ]


def main() -> None:
    options = parser(__doc__, "sweep_overhead")
    options.add_argument(
        "--jobs", type=int, default=8, help="number of jobs of a sweep (default: %(default)s)"
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="runs of each pair (default: %(default)s)"
    )
    chosen = options.parse_args()
    rows, figures = [], {}
    for way, (single, sweep) in WAYS.items():
        candidates = {
            "alone": partial(alone, single),
            "sweep": partial(in_a_sweep, sweep, chosen.jobs),
        }
        values = alternate(way, candidates, chosen.repetitions)
        taken = {
            side: {key: [one[key] for one in all_] for key in all_[0]}
            for side, all_ in values.items()
        }
        ratio = compare(taken["sweep"]["cpu"], taken["alone"]["cpu"])
        spreads = {
            side: {key: spread(all_) for key, all_ in keys.items()} for side, keys in taken.items()
        }
        figures[way] = {**spreads, "cpu_ratio": ratio}
        both = [
            ", ".join(cell(spreads[side][key], ".1f") for key in ("wall", "cpu"))
            for side in ("alone", "sweep")
        ]
        costs = [cell(spreads["sweep"][key], ".2f") for key in ("between", "skip")]
        rows.append([way, *both, cell(ratio, ".2f"), *costs])
    report(chosen.out, {"jobs": chosen.jobs, "ways": figures}, HEADER, rows, readme(figures))


if __name__ == "__main__":
    main()
