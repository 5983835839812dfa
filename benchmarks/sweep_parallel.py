"""Measure the jobs per hour of a sweep with two concurrent jobs of one thread each.

The same eight jobs run in four ways: one after the other in one process, and two concurrently
(`sweep.parallel=2`). The other two ways show the ceiling of the machine: two concurrent plain runs,
which load torch for each job, and two concurrent sweeps of half of the jobs each, which load torch
once for each half. The script fails if the weights of a job differ between the ways by a byte. It
also fails if the sweep with concurrent jobs is neither 1.6 times as fast as one job after the other
nor reaches 0.9 of the higher ceiling.

    python benchmarks/sweep_parallel.py
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, alternate, cell, compare, corpus_path, environment, parser, report, spread

PYTHON = [sys.executable, str(ROOT / "main.py")]
LRS = ("5e-4", "1e-3", "2e-3", "4e-3")
DROPOUTS = ("0", "0.1")
JOBS = len(LRS) * len(DROPOUTS)
RUN = [
    "experiment=shakespeare_char_cpu",
    "trainer.precision=fp32",
    "trainer.eval_every=100",
    "trainer.eval_steps=20",
    "trainer.sample_every=null",
    "optimizer.warmup_steps=20",
]
IN_TURN, PARALLEL = "one after the other", "`sweep.parallel=2`"
PLAIN, HALVES = "two plain runs at a time", "two sweeps of half of the jobs each"
GOAL, GOAL_OF_CEILING = 1.6, 0.9
HEADER = ["way", "seconds", "jobs/hour", "times the speed of one after the other"]


@dataclass(frozen=True)
class Measured:
    """One measurement of all jobs in one of the ways.

    Attributes:
        seconds: Time that all jobs took.
        digests: SHA-256 of the weights of each job, by learning rate and dropout.
    """

    seconds: float
    digests: dict[tuple[float, float], str]

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s"


def grid(lrs: Sequence[str], name: str, *overrides: str) -> list[str]:
    """Build the arguments of a sweep."""
    values = [f"optimizer.lr={','.join(lrs)}", f"model.dropout={','.join(DROPOUTS)}"]
    return ["-m", f"run.name={name}", *overrides, *values]


def plain_runs() -> list[list[str]]:
    """Build the arguments that train each job as a run of its own."""
    pairs = itertools.product(LRS, DROPOUTS)
    return [
        [f"run.name=job{number}", f"optimizer.lr={lr}", f"model.dropout={dropout}"]
        for number, (lr, dropout) in enumerate(pairs)
    ]


# For each way, the arguments of its commands. Two of the commands run concurrently.
WAYS = {
    IN_TURN: [grid(LRS, "in_turn")],
    PARALLEL: [grid(LRS, "parallel", "sweep.parallel=2")],
    PLAIN: plain_runs(),
    HALVES: [grid(LRS[:2], "first"), grid(LRS[2:], "second")],
}


def run(arguments: list[str], steps: int, cwd: Path) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: The command failed. The error shows the end of its output.
    """
    command = [*PYTHON, *arguments, *RUN, f"trainer.max_steps={steps}"]
    command.append(f"data.path={corpus_path()}")
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


def digests(directory: Path, steps: int) -> dict[tuple[float, float], str]:
    """Hash the weights of every run below a directory, by learning rate and dropout."""
    found = {}
    for path in directory.glob(f"**/snapshots/step_{steps:08}/model.safetensors"):
        config = yaml.safe_load((path.parents[2] / "config.yaml").read_text())
        values = config["optimizer"]["lr"], config["model"]["dropout"]
        found[values] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def measure(commands: list[list[str]], steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(run, steps=steps, cwd=Path(directory)), commands))
        seconds = time.perf_counter() - begin
        return Measured(seconds, digests(Path(directory), steps))


def count_same(measured: dict[str, list[Measured]]) -> int:
    """Count the jobs that have the same weights in all ways and repetitions."""
    everything = [each.digests for rounds in measured.values() for each in rounds]
    return sum(len({one.get(job) for one in everything}) == 1 for job in everything[0])


def readme(speedup: dict[str, Any], of_ceiling: dict[str, Any], same: int) -> list[tuple[str, str]]:
    what = f"{JOBS} jobs of a sweep of one thread each, two at a time against one after the other"
    figure = f"{cell(speedup, '.2f')} times the jobs per hour, {cell(of_ceiling, '.2f')} of two"
    figure += f" plain runs at a time; {same} of {JOBS} with the same weights, byte for byte"
    return [(what, figure)]


def main() -> None:
    options = parser(__doc__, "sweep_parallel")
    options.add_argument(
        "--steps", type=int, default=250, help="number of steps of a job (default: %(default)s)"
    )
    options.add_argument(
        "--repetitions", type=int, default=3, help="runs of each way (default: %(default)s)"
    )
    chosen = options.parse_args()
    candidates = {way: partial(measure, commands, chosen.steps) for way, commands in WAYS.items()}
    measured = alternate("8 jobs", candidates, chosen.repetitions)
    seconds = {way: [each.seconds for each in rounds] for way, rounds in measured.items()}
    speedups = {way: compare(seconds[IN_TURN], theirs) for way, theirs in seconds.items()}
    least = [min(pair) for pair in zip(seconds[PLAIN], seconds[HALVES], strict=True)]
    of_ceiling = compare(least, seconds[PARALLEL])
    same = count_same(measured)
    rows = []
    for way, times in seconds.items():
        per_hour = spread([JOBS * 3600 / each for each in times])
        speed = cell(speedups[way], ".2f")
        rows.append([way, cell(spread(times), ".1f"), cell(per_hour), speed])
    results: dict[str, Any] = {
        "jobs": JOBS,
        "steps": chosen.steps,
        "seconds": {way: spread(times) for way, times in seconds.items()},
        "speedups": speedups,
        "of_ceiling": of_ceiling,
        "same_weights": same,
    }
    report(chosen.out, results, HEADER, rows, readme(speedups[PARALLEL], of_ceiling, same))
    print(f"\n{PARALLEL}: {cell(of_ceiling, '.2f')} of the ceiling, the faster of the last two")
    print(f"{same} of {JOBS} jobs have the same weights, byte for byte, in all ways")
    is_fast = speedups[PARALLEL]["median"] >= GOAL or of_ceiling["median"] >= GOAL_OF_CEILING
    sys.exit(0 if is_fast and same == JOBS else 1)


if __name__ == "__main__":
    main()
