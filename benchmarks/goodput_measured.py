"""Measure with a stopwatch what a kill -9 of a worker costs, and the goodput of runs under kills.

Two ranks train `experiment=shakespeare_char_cpu` under `ddp.nproc_per_node=2`. All times are taken
from outside, from `metrics.jsonl`, which gets a line for each step when it is done. The parts are:

kills          Kill one worker or the other at random times, with snapshot.every_steps=10 and with
               auto. Measure the seconds from the kill to the first new step, whose number is above
               all steps before the kill. Also measure the training time that a kill loses, which is
               the time of the repeated steps at the pace before the kill.
minute         Kill a worker of a run once a minute, for --minutes.
ten-minutes    Kill a worker of a run once in ten minutes, for three times as long.

Both runs have every_steps=auto. Their snapshot.mtbf_hours is set as by a user who knows the rate of
failures. The single kills use its default, so the first one comes before the run knows the rate.

Goodput by stopwatch is the time that the steps of the run take undisturbed, divided by the time
from the command to the last step. The time of an undisturbed step is measured in the same attempt,
while no save is in progress, by the times in `main.rank0.log`. A run before or after would tell
little, because the pace of a shared machine drifts by a fifth within a minute. The run reports its
own goodput in `result.json`, where steps that a save slows down count as steps. The script fails if
this is more than a percentage point below the goodput by stopwatch. Other processes on the machine
falsify all results.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/goodput_measured.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from common import ROOT, corpus_path, environment, log, parser, report
from stopwatch import find_worker, kill_tree

from mingpt_ddp.metrics.jsonl import METRICS, HistoryEnd, read_end

PARTS = ("kills", "minute", "ten-minutes")
BETWEEN_S = {"minute": 60.0, "ten-minutes": 600.0}
LENGTH = {"minute": 1, "ten-minutes": 3}  # length of a run, in units of --minutes
GOALS = {"minute": 0.95, "ten-minutes": 0.98}
# The run's own goodput may be this much below its goodput by stopwatch.
TOLERANCE = 0.01
PATIENCE_S = 120.0
SETTINGS = [
    "experiment=shakespeare_char_cpu",
    "data.sha256=null",
    "ddp.nproc_per_node=2",
    "ddp.max_restarts=100000",
    "trainer.device=cpu",
    "trainer.max_epochs=null",
    "trainer.max_steps=10000000",
    "trainer.eval_every=null",
    "trainer.sample_every=null",
    "trainer.log_every=1",
]
SLOW_STEPS = 20  # the first steps of an attempt are slower than later ones
EVENT = re.compile(
    r"^(?P<time>\S+ \S+) INFO (?:(?P<start>run )"
    r"|resuming from the snapshot of step (?P<resumed>\d+)"
    r"|step (?P<step>\d+)/"
    r"|(?P<save>the next snapshot is due)"
    r"|(?P<saved>snapshot of step \d+ committed))",
    re.MULTILINE,
)
_names = itertools.count()


@dataclass
class Attempt:
    """The steps of one attempt.

    Attributes:
        resumed: Step of the snapshot that the attempt resumed from, or 0.
        step: Last step of the attempt.
        quiet_s: Seconds of each step during which no save was in progress.
    """

    resumed: int = 0
    step: int = 0
    quiet_s: list[float] = field(default_factory=list)


class Run:
    """A run that trains until this process stops it."""

    def __init__(self, scratch: Path, *overrides: str) -> None:
        name = f"run-{next(_names)}"
        self.directory = scratch / "outputs" / name
        self.output = scratch / f"{name}.txt"
        self.began = time.perf_counter()
        command = [
            sys.executable,
            str(ROOT / "main.py"),
            *SETTINGS,
            f"data.path={corpus_path()}",
            f"data.cache_dir={scratch / 'cache'}",
        ]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"run.name={name}", *overrides],
                cwd=scratch,
                env=environment(),
                stdout=output,
                stderr=output,
            )

    @property
    def step(self) -> int:
        """The last step that is done. After a kill it may be a repeated step."""
        return (read_end(self.directory / METRICS) or HistoryEnd()).reached

    def wait_until(self, is_over: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        """Wait for a condition. If the run ends or takes too long, exit with its output."""
        until = time.perf_counter() + limit_s
        while not is_over():
            if self.process.poll() is not None or time.perf_counter() > until:
                kill_tree(self.process.pid)
                sys.exit(f"the run did not continue:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.005)

    def train_for(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        self.wait_until(lambda: time.perf_counter() >= until, seconds + PATIENCE_S)

    def kill(self, rank: int) -> tuple[float, int]:
        """Kill a worker, and wait until the other one has ended too.

        Return the time of the kill and the highest step so far.
        """
        victim, other = find_worker(self.process.pid, rank), find_worker(self.process.pid, 1 - rank)
        killed = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        self.wait_until(lambda: not is_alive(other))
        return killed, self.step

    def stop(self) -> dict[str, Any]:
        """Preempt the run and return its result."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        result: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return result


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_attempts(log_text: str) -> list[Attempt]:
    """Read the attempts of a run from its main.rank0.log, which has a line for every step."""
    attempts: list[Attempt] = []
    # The end of the previous step, if no save was in progress then.
    since: datetime | None = None
    is_saving = False
    for event in EVENT.finditer(log_text):
        if event["start"]:
            attempts.append(Attempt())
            since, is_saving = None, False
        elif event["resumed"]:
            attempts[-1].resumed = int(event["resumed"])
        elif event["save"] or event["saved"]:
            is_saving = event["save"] is not None
            since = None
        else:
            now = datetime.strptime(event["time"], "%Y-%m-%d %H:%M:%S,%f")
            attempt = attempts[-1]
            attempt.step = int(event["step"])
            if since is not None and attempt.step > attempt.resumed + SLOW_STEPS:
                attempt.quiet_s.append((now - since).total_seconds())
            since = None if is_saving else now
    # Leave out attempts that were killed before their first step.
    return [attempt for attempt in attempts if attempt.step]


def undisturbed_s(attempts: list[Attempt]) -> float:
    """Compute the time that the steps that the run has kept would take without saves and kills."""
    paces = [mean(attempt.quiet_s) for attempt in attempts if attempt.quiet_s]
    if not paces:
        sys.exit("the run is too short: no step was undisturbed")
    pace = paces[0]
    total = 0.0
    ends = [*(attempt.resumed for attempt in attempts[1:]), attempts[-1].step]
    for attempt, end in zip(attempts, ends, strict=True):
        # A short attempt without undisturbed steps gets the pace of the previous one.
        if attempt.quiet_s:
            pace = mean(attempt.quiet_s)
        total += (end - attempt.resumed) * pace
    return total


def single_kills(scratch: Path, every: str, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill workers of a run one by one.

    Measure the seconds until the first new step, and the seconds of lost training.
    """
    run = Run(scratch, f"snapshot.every_steps={every}")
    run.wait_until(lambda: run.step >= 50)
    # With auto, the first snapshot comes after 30 s at the latest.
    if every == "auto":
        run.wait_until(lambda: any(run.directory.glob("snapshots/*/manifest.json")))
    recovered, lost = [], []
    for number in range(kills):
        first, begin = run.step, time.perf_counter()
        run.train_for(rng.uniform(4.0, 6.0))
        pace = (time.perf_counter() - begin) / max(1, run.step - first)
        killed, highest = run.kill(number % 2)
        run.wait_until(lambda highest=highest: run.step > highest)  # type: ignore[misc]
        recovered.append(time.perf_counter() - killed)
        lost.append(pace * (highest - resumed_step(run.directory)))
        log(f"every_steps={every}, kill {number + 1}: {recovered[-1]:.2f} s, lost {lost[-1]:.2f} s")
    run.stop()
    return {
        "to_a_new_step_s": summary(recovered),
        "lost_training_s": summary(lost),
        "stages_s": restart_stages((run.directory / "main.rank0.log").read_text()),
    }


def restart_stages(log_text: str) -> dict[str, float]:
    """Compute the median seconds of each stage of the restarts from main.rank0.log."""
    starts = re.findall(r"INFO the stages of this start took: (.*)", log_text)[1:]
    seconds: dict[str, list[float]] = {}
    for start in starts:
        for stage, taken in re.findall(r"([a-z ]+) ([\d.]+) s", start):
            seconds.setdefault(stage.strip(), []).append(float(taken))
    return {stage: round(median(values), 3) for stage, values in seconds.items()}


def resumed_step(run: Path) -> int:
    """Return the step of the snapshot that the last attempt has resumed from."""
    records = map(json.loads, (run / METRICS).read_bytes().split(b"\n")[:-1])
    starts = [record["step"] for record in records if "start" in record]
    return int(starts[-1])


def summary(values: list[float]) -> dict[str, Any]:
    """Compute the median, the 90th percentile and the maximum, and keep all values."""
    p90 = quantiles(values, n=10, method="inclusive")[-1]
    rounded = [round(value, 3) for value in values]
    return {
        "median": round(median(values), 3),
        "p90": round(p90, 3),
        "highest": max(rounded),
        "all": rounded,
    }


def under_kills(scratch: Path, seconds: float, between_s: float) -> dict[str, Any]:
    """Measure the goodput of a run under kills by stopwatch, and read the run's own.

    The first kill comes half an interval after the command, so there is one kill in each interval.

    Args:
        scratch: Directory for the run.
        seconds: Length of the run.
        between_s: Time between two kills.
    """
    mtbf = f"snapshot.mtbf_hours={between_s / 3600:.4f}"
    run = Run(scratch, "snapshot.every_steps=auto", mtbf)
    run.wait_until(lambda: run.step >= 1)
    kills = 0
    while (due := (kills + 0.5) * between_s) < seconds:
        run.train_for(max(0.0, due - (time.perf_counter() - run.began)))
        _, highest = run.kill(kills % 2)
        run.wait_until(lambda highest=highest: run.step > highest)  # type: ignore[misc]
        kills += 1
        log(f"kill {kills}, after {time.perf_counter() - run.began:.0f} s")
    run.train_for(max(0.0, seconds - (time.perf_counter() - run.began)))
    wall_s = time.perf_counter() - run.began
    log_text = (run.directory / "main.rank0.log").read_text()
    result = run.stop()
    attempts = read_attempts(log_text)
    return {
        "seconds": round(wall_s, 2),
        "kills": kills,
        "steps": attempts[-1].step,
        "saves": len(re.findall("INFO snapshot of step", log_text)),
        "undisturbed_s": round(undisturbed_s(attempts), 2),
        "by_stopwatch": round(undisturbed_s(attempts) / wall_s, 4),
        "own": round(result["goodput"], 4),
    }


def command_line() -> argparse.Namespace:
    options = parser(__doc__, "goodput_measured")
    options.add_argument(
        "--parts", default=",".join(PARTS), help="parts, separated by commas (default: %(default)s)"
    )
    options.add_argument(
        "--kills",
        type=int,
        default=20,
        help="number of kills with each value of snapshot.every_steps (default: %(default)s)",
    )
    options.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="length of the run of the part minute (default: %(default)s)",
    )
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    chosen.parts = chosen.parts.split(",")
    if unknown := {*chosen.parts} - {*PARTS}:
        options.error(f"unknown part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    return chosen


def kills_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Write the rows of the part kills for docs/benchmarks.md."""
    rows = []
    for every, found in results["kills"].items():
        seconds, lost = found["to_a_new_step_s"], found["lost_training_s"]
        rows.append(
            (
                f"kill -9 of one of 2 workers, `snapshot.every_steps={every}`, "
                f"{len(seconds['all'])} times: seconds to the first new step",
                f"median {seconds['median']:.2f}, p90 {seconds['p90']:.2f}; of them repeated "
                f"training {lost['median']:.2f}, p90 {lost['p90']:.2f}",
            )
        )
        stages = [f"{stage} {taken:.2f}" for stage, taken in found["stages_s"].items()]
        rows.append(
            (
                f"seconds from the fork of these workers to their first step, "
                f"`snapshot.every_steps={every}`",
                f"{', '.join(stages)} (medians)",
            )
        )
    return rows


def run_row(part: str, found: dict[str, Any]) -> tuple[str, str]:
    """Write the row of a run under kills for docs/benchmarks.md."""
    return (
        f"goodput of {found['seconds'] / 60:.0f} minutes, `every_steps=auto`, one kill -9 in "
        f"{BETWEEN_S[part] / 60:.0f} minutes",
        f"{found['by_stopwatch']:.3f} by stopwatch, {found['own']:.3f} by the run itself",
    )


def main() -> None:
    chosen = command_line()
    rng = random.Random(chosen.seed)
    results: dict[str, Any] = {"seed": chosen.seed}
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="goodput-") as directory:
        scratch = Path(directory)
        if "kills" in chosen.parts:
            ways = ("10", "auto")
            results["kills"] = {
                every: single_kills(scratch, every, chosen.kills, rng) for every in ways
            }
            rows += kills_rows(results)
        for part in ("minute", "ten-minutes"):
            if part in chosen.parts:
                seconds = 60 * chosen.minutes * LENGTH[part]
                results[part] = under_kills(scratch, seconds, BETWEEN_S[part])
                rows.append(run_row(part, results[part]))
    report(chosen.out, results, ["what", "figure"], rows, rows)
    failures = []
    for part, goal in GOALS.items():
        found = results.get(part)
        if found and found["by_stopwatch"] < goal:
            failures.append(f"{part}: goodput {found['by_stopwatch']}, below {goal}")
        if found and found["own"] < found["by_stopwatch"] - TOLERANCE:
            failures.append(
                f"{part}: {found['by_stopwatch']} by stopwatch, {found['own']} by itself"
            )
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
