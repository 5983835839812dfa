"""Measure the time and the memory of a trainer's steps from outside, by its log lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import environment

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Pace:
    """The cost of a step.

    Attributes:
        wall_s: Wall time of a step.
        cpu_s: CPU time of a step, over all processes of the trainer.
        peak_mb: Peak resident memory of all processes together, up to the end of the span.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float


@contextlib.contextmanager
def running(
    command: Sequence[str], cwd: Path, threads: int = 1, limit_s: float | None = None
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Start a trainer, and yield its process and its output lines.

    It is killed at the end of the context, or after `limit_s` seconds.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(threads),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, kill_tree, [process.pid])
    timer.start()
    try:
        yield process, iter(process.stdout)
    finally:
        timer.cancel()
        kill_tree(process.pid)
        process.wait()
        process.stdout.close()


def pace(
    command: Sequence[str],
    cwd: Path,
    pattern: str,
    span: tuple[int, int],
    threads: int = 1,
    limit_s: float | None = None,
) -> Pace:
    """Run a trainer until it has logged the last step of a span, then kill it.

    The clocks are read when the log line of a step arrives. So startup and warm-up do not count.

    Args:
        command: The command that trains.
        cwd: Its working directory.
        pattern: Regular expression for the log line of a step, with a group for the step number.
        span: Number of warm-up steps, and smallest number of steps to time.
        threads: Number of threads of each process.
        limit_s: Seconds from the start after which the trainer is killed. None sets no limit.

    Raises:
        RuntimeError: The trainer exited early. The error shows its last lines.
    """
    warmup, timed = span
    stamps: dict[int, tuple[float, float]] = {}
    tail: list[str] = []
    with running(command, cwd, threads, limit_s) as (process, lines):
        for line in lines:
            now = time.perf_counter(), sum(map(cpu_seconds, process_tree(process.pid)))
            tail = [*tail[-20:], line]
            found = re.search(pattern, line)
            if found and int(found[1]) >= warmup:
                stamps[int(found[1])] = now
                if max(stamps) - min(stamps) >= timed:
                    break
        else:
            raise RuntimeError(
                f"{' '.join(command[:3])} ended before its step {warmup + timed}:\n{''.join(tail)}"
            )
        peak_mb = sum(map(peak_memory_mb, process_tree(process.pid)))
    first, last = min(stamps), max(stamps)
    wall, cpu = (after - before for before, after in zip(stamps[first], stamps[last], strict=True))
    return Pace(wall / (last - first), cpu / (last - first), peak_mb)


def kill_tree(process: int) -> None:
    """Kill a process and its descendants."""
    # Make a list first, because the children of a killed process get another parent.
    for member in list(process_tree(process)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def process_tree(process: int) -> Iterator[int]:
    """Yield the pids of a process and its descendants."""
    yield process
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from process_tree(int(child))


def find_worker(process: int, rank: int) -> int:
    """Find the pid of a rank among a process and its descendants. It has the rank's log open."""
    return next(pid for pid in process_tree(process) if has_open_file(pid, f"/main.rank{rank}.log"))


def has_open_file(pid: int, name: str) -> bool:
    """Return True if a process has a file open whose path ends with `name`."""
    try:
        return any(os.readlink(path).endswith(name) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has exited
        return False


def cpu_seconds(process: int) -> float:
    """Return the user and system time of a process, or 0 if it has exited."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def peak_memory_mb(process: int) -> float:
    """Return the peak resident memory of a process in MB, or 0 if it has exited."""
    try:
        found = re.search(
            r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), flags=re.MULTILINE
        )
    except OSError:
        return 0.0
    return int(found[1]) * 1024 / 1e6 if found else 0.0
