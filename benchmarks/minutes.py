"""Measure how long a run with trainer.max_minutes takes, on a quiet and on a busy machine.

A run fixes its number of steps after a tenth of its minutes. If the machine becomes slower later,
the run takes longer. Three conditions are measured in turn: nothing else runs; a busy loop on each
core runs as long as the run does; these loops begin in the middle of the minutes. The script starts
and ends the loops. Other programs disturb the measurement: look at the load that is printed first.

For each run the script prints the time of a step in each fifth of the run. It also prints how long
the run would have taken if it had fixed its number of steps earlier, from the mean time of steps 3
to 20.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/minutes.py
    MINGPT_SHAKESPEARE=input.txt python benchmarks/minutes.py --minutes 5 --ways quiet
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from common import ROOT, alternate, cell, corpus_path, environment, log, parser, report, spread

COMMAND = [sys.executable, str(ROOT / "main.py"), "experiment=shakespeare_char_cpu"]
SETTINGS = [
    "trainer.device=cpu",
    "trainer.eval_every=null",
    "trainer.log_every=1",  # metrics.jsonl then has the time of each step
    "run.name=run",
    "run.resume=never",
]
# Steps 3 to 20: the first two are slower.
FIRST = slice(2, 20)
# End a run that takes longer than LONGEST times its minutes plus START_S seconds for its start.
LONGEST = 20.0
START_S = 120.0
# A busy loop. It ends when the script ends, even if the script is killed.
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
WAYS = {
    "quiet": "nothing beside it",
    "busy": "a busy loop on each core",
    "later": "the loops begin in the middle",
}


class Taken(NamedTuple):
    """The duration of a run and of its steps.

    Attributes:
        minutes: Duration of the run in minutes.
        by_first_steps: Minutes that the run would have taken if its first steps had fixed the
            number of steps.
        fifths: Milliseconds per step in each fifth of the steps.
    """

    minutes: float
    by_first_steps: float
    fifths: list[float]


@contextlib.contextmanager
def busy_loops(after_s: float) -> Iterator[None]:
    """Keep all cores busy in this context, from `after_s` seconds after its start to its end."""
    loops: list[subprocess.Popen[bytes]] = []
    has_ended = threading.Event()

    def begin() -> None:
        if not has_ended.wait(after_s):
            for _ in range(os.cpu_count() or 1):
                loops.append(subprocess.Popen([sys.executable, "-c", LOOP]))

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        for loop in loops:
            loop.kill()
            loop.wait()


def measured(directory: Path, limit: float) -> Taken:
    """Read the duration of a run from its files.

    Args:
        directory: The run directory.
        limit: The value of trainer.max_minutes, in minutes.
    """
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    step_ms = [row["step_ms"] for row in map(json.loads, lines) if "step_ms" in row]
    fifths = [fmean(step_ms[len(step_ms) * i // 5 : len(step_ms) * (i + 1) // 5]) for i in range(5)]
    steps = int(60e3 * limit / fmean(step_ms[FIRST]))
    # The earlier number of steps may be larger than the run's. The run has no times for the steps
    # beyond its end, so they are assumed to take as long as the steps of its last fifth.
    missing = max(0, steps - len(step_ms))
    by_first_steps = (sum(step_ms[:steps]) + missing * fifths[-1]) / 60e3
    minutes = float(json.loads((directory / "result.json").read_text())["minutes"])
    return Taken(minutes, by_first_steps, fifths)


def run_for(minutes: float, busy_after_s: float | None, cwd: Path, threads: int) -> Taken:
    """Train for some minutes.

    Args:
        minutes: The value of trainer.max_minutes.
        busy_after_s: Seconds after which the busy loops begin. None runs no loops.
        cwd: Working directory.
        threads: Number of threads of the run.
    """
    with tempfile.TemporaryDirectory(dir=cwd) as root:
        data = [f"data.path={corpus_path()}", f"data.cache_dir={cwd / 'cache'}"]
        limit = [f"trainer.max_minutes={minutes:g}", f"run.root={root}"]
        loops = contextlib.nullcontext() if busy_after_s is None else busy_loops(busy_after_s)
        with loops:
            done = subprocess.run(
                [*COMMAND, *SETTINGS, *data, *limit],
                cwd=cwd,
                env=environment(threads),
                capture_output=True,
                text=True,
                timeout=LONGEST * 60 * minutes + START_S,
            )
        if done.returncode:
            sys.exit(f"the run failed:\n{done.stderr[-2000:]}")
        taken = measured(Path(root) / "run", minutes)
    paces = " ".join(f"{each:.1f}" for each in taken.fifths)
    log(
        f"{taken.minutes:.4f} minutes; by the first steps {taken.by_first_steps:.4f}; "
        f"milliseconds per step in each fifth: {paces}"
    )
    return taken


def main() -> None:
    options = parser(__doc__, "minutes")
    options.add_argument(
        "--minutes", type=float, default=0.5, help="trainer.max_minutes (default: %(default)s)"
    )
    options.add_argument(
        "--repetitions", type=int, default=5, help="runs in each condition (default: %(default)s)"
    )
    options.add_argument(
        "--threads", type=int, default=1, help="number of threads of a run (default: %(default)s)"
    )
    options.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="conditions to measure (default: all)",
    )
    chosen = options.parse_args()
    load = os.getloadavg()[0]
    log(f"other programs: load {load:.2f} on {os.cpu_count()} cores")
    begins = {"quiet": None, "busy": 0.0, "later": 30 * chosen.minutes}
    with tempfile.TemporaryDirectory(prefix="minutes-") as scratch:
        cwd = Path(scratch)
        run_for(0.1, None, cwd, chosen.threads)  # encodes the text
        ways = {
            way: partial(run_for, chosen.minutes, begins[way], cwd, chosen.threads)
            for way in chosen.ways
        }
        values = alternate("minutes", ways, chosen.repetitions)
    limit = chosen.minutes
    shares = {way: spread([each.minutes / limit for each in values[way]]) for way in ways}
    first = {way: spread([each.by_first_steps / limit for each in values[way]]) for way in ways}
    rows = [[WAYS[way], cell(shares[way], ".3f"), cell(first[way], ".3f")] for way in ways]
    what = f"minutes taken over `trainer.max_minutes={limit:g}`, load {load:.1f} before"
    readme = [(f"{what}: {WAYS[way]}", f"{cell(shares[way], '.3f')} times") for way in ways]
    settings = {"minutes": limit, "threads": chosen.threads, "load_before": load}
    runs = {way: [each._asdict() for each in values[way]] for way in ways}
    report(
        chosen.out,
        {"shares": shares, "by_first_steps": first, "runs": runs, **settings},
        ["beside the run", what, "by the pace of the first steps"],
        rows,
        readme,
    )


if __name__ == "__main__":
    main()
