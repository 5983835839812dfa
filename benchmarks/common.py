"""Help all benchmarks to describe the machine, alternate runs, take medians and write results.

This module does not import torch, so that child processes do not inherit its peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEXT_VARIABLE = "MINGPT_SHAKESPEARE"
sys.path.insert(0, str(ROOT))  # use the package of this checkout, even if it is not installed


def parser(docstring: str | None, name: str) -> argparse.ArgumentParser:
    """Make a parser with the docstring as its help, and with an option for the output file."""
    made = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--out",
        type=Path,
        default=RESULTS / f"{name}.json",
        help="JSON file (default: %(default)s)",
    )
    return made


def log(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def corpus_path() -> Path:
    """Return the local path of tinyshakespeare."""
    path = Path(os.environ.get(TEXT_VARIABLE, ""))
    if not path.is_file():
        sys.exit(
            f"set {TEXT_VARIABLE} to a copy of tinyshakespeare (conf/data/shakespeare.yaml "
            "says where it is)"
        )
    return path.resolve()


def environment(threads: int = 1) -> dict[str, str]:
    """Make an environment for child processes, with a number of threads.

    Variables of a launcher are left out.
    """
    kept = {
        k: v
        for k, v in os.environ.items()
        if not re.match(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC", k)
    }
    count = str(threads)
    return {**kept, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONUNBUFFERED": "1"}


def children_cpu_seconds() -> float:
    """Return the user and system time of all descendants that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(command: Sequence[str], cwd: Path, threads: int = 1) -> tuple[float, float]:
    """Run a command, and measure its wall seconds and the CPU seconds of all its descendants.

    A descendant may outlive its own parent, as processes of the fork server do. Its CPU time would
    not be counted. This process therefore adopts such descendants and waits for them, too. The wall
    time does not include this wait.

    Raises:
        RuntimeError: The command failed. The error shows the end of its output.
    """
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
    used, begin = children_cpu_seconds(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            command, cwd=cwd, env=environment(threads), stdout=output, stderr=subprocess.STDOUT
        )
        wall = time.perf_counter() - begin
        if done.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{output.read()[-2000:]}")
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            os.wait()
    return wall, children_cpu_seconds() - used


def nats_per_character(result: Mapping[str, Any]) -> float:
    """Compute the validation loss per character, which can be compared between tokenizers.

    Args:
        result: The values of result.json.
    """
    return math.log(2) * float(result["bits_per_char"])


def last_step(run: Path) -> int:
    """Return the last trained step in metrics.jsonl, or 0 if there is none."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((row["step"] for row in map(json.loads, lines) if "train_loss" in row), default=0)


def machine() -> dict[str, Any]:
    """Describe the hardware, the software and the date of the measurement."""
    try:
        names = re.findall(
            r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE
        )
    except OSError:
        names = []
    cpu = names[0].strip() if names else platform.processor() or platform.machine()
    limit = os.environ.get("ATEN_CPU_CAPABILITY")  # limits the instructions of torch's kernels
    return {
        "cpu": f"{cpu}, limited to {limit.upper()}" if limit else cpu,
        "cores": os.cpu_count(),
        **gpu(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def gpu() -> dict[str, str]:
    """Look up the name of the first GPU, if there is one."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return {"gpu": names[0].strip()} if names else {}


def in_fresh_process(
    function: Callable[..., T], *arguments: Any, limit_s: float | None = None
) -> T:
    """Call `function` in a new interpreter and return its result.

    Args:
        function: The function.
        arguments: Its arguments.
        limit_s: Seconds after which the interpreter is killed. None waits for any time.

    Raises:
        BrokenProcessPool: The process was killed, for example because it exceeded the limit.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(function, *arguments)
        timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, end_children)
        timer.start()
        try:
            return future.result()
        finally:
            timer.cancel()


def end_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def compose_config(*overrides: str) -> Any:
    """Compose and validate the configuration with these overrides."""
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
    from mingpt_ddp.config.config import from_mapping, to_plain

    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", list(overrides))))


def alternate(
    what: str, candidates: Mapping[str, Callable[[], T]], repetitions: int
) -> dict[str, list[T]]:
    """Measure candidates in turns, so that drifts of the machine's load cancel in paired ratios.

    Args:
        what: Name of the comparison in the progress.
        candidates: Functions that measure once, by name.
        repetitions: Number of measurements of each candidate.
    """
    values: dict[str, list[T]] = {name: [] for name in candidates}
    for repetition in range(1, repetitions + 1):
        for name, measure in candidates.items():
            values[name].append(measure())
            log(f"{what}, repetition {repetition}/{repetitions}, {name}: {values[name][-1]}")
    return values


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Compute the median and the range. They and all values are rounded to five digits."""
    rounded = [float(f"{value:.5g}") for value in values]
    return {
        "median": float(f"{median(values):.5g}"),
        "low": min(rounded),
        "high": max(rounded),
        "all": rounded,
    }


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Divide our values by theirs, pair by pair, and compute the spread of the ratios."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def cell(values: dict[str, Any], form: str = ",.0f") -> str:
    """Format a spread for a table, as `median (low .. high)`."""
    return f"{values['median']:{form}} ({values['low']:{form}} .. {values['high']:{form}})"


def report(
    out: Path,
    results: dict[str, Any],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    readme: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the JSON file and print a Markdown table.

    Args:
        out: The JSON file.
        results: Values for the JSON file, besides the description of the machine.
        header: Header of the table.
        rows: Rows of the table.
        readme: Rows of docs/benchmarks.md, as pairs of a description and a figure. `table.py`
            writes them.
    """
    here = machine()
    about = {"machine": here, "script": Path(sys.argv[0]).name, "readme": readme}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, **results}, indent=2) + "\n")
    print("{cpu}, {cores} cores, torch {torch}, Python {python}, {date}\n".format(**here))
    for row in [header, ["---"] * len(header), *rows]:
        print(f"| {' | '.join(row)} |")
