"""Time and peak memory of reading a long `metrics.jsonl`, and of finding its end.

Writes a file of a million lines with 400 starts into a temporary directory: each attempt repeats up
to 50 steps of the one before, and every twentieth step has an evaluation. New processes then

1. only import the reader,
2. read the whole file, as a report does,
3. read its end, as every start of a run does,
4. write the report of the run.

Seconds are CPU time. Memory is the process's ru_maxrss, with the imports.

    python benchmarks/metrics_history.py
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import in_fresh_process, parser, report, spread

STARTS = 400
REPEATED = 50  # steps, at most
HEADER = ["what", "CPU seconds", "peak memory, MB"]
KEYS = ("train_loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "goodput", "epoch", "peak_mib")
VAL_KEYS = ("val_loss", "val_accuracy", "val_bits_per_byte", "val_bits_per_char")


def write_history(path: Path, lines: int) -> None:
    """Write a file of about so many lines."""
    draw = random.Random(1)
    step = 0
    with open(path, "w") as file:
        for number in range(STARTS):
            start = {"start": 1.7e9 + number, "step": step, "world_size": 2}
            file.write(json.dumps(start) + "\n")
            end = step + lines // STARTS
            while step < end:
                step += 1
                for keys in [KEYS, VAL_KEYS] if step % 20 == 0 else [KEYS]:
                    record = {"step": step, **{key: draw.random() for key in keys}}
                    file.write(json.dumps(record) + "\n")
            step -= draw.randrange(REPEATED)


def only_import(path: Path) -> None:
    import mingpt_ddp.metrics.jsonl  # noqa: F401


def read_all(path: Path) -> None:
    from mingpt_ddp.metrics.jsonl import read_history

    assert read_history(path).starts == STARTS


def read_last(path: Path) -> None:
    from mingpt_ddp.metrics.jsonl import read_end

    end = read_end(path)
    assert end is not None and end.step


def write_report(path: Path) -> None:
    from mingpt_ddp.results.report import report

    report([path.parent], path.parent / "report.html")


def measure(function: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """Return the CPU seconds of a function, and the peak memory of its process in MB."""
    begin = time.process_time()
    function(path)
    seconds = time.process_time() - begin
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    arguments = parser(__doc__ or "", "metrics_history")
    arguments.add_argument("--lines", type=int, default=950_000, help="without the evaluations")
    arguments.add_argument("--repetitions", type=int, default=3)
    options = arguments.parse_args()
    ways = {
        "only import": only_import,
        "read the whole file": read_all,
        "read its end": read_last,
        "write the report": write_report,
    }
    results: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "metrics.jsonl")
        write_history(path, options.lines)
        with open(path, "rb") as file:
            count = sum(1 for _ in file)
        for name, function in ways.items():
            measured = [
                in_fresh_process(measure, function, path) for _ in range(options.repetitions)
            ]
            seconds, memory = map(spread, zip(*measured, strict=True))
            results[name] = {"seconds": seconds, "peak_mb": memory}
            rows.append([name, f"{seconds['median']:.4f}", f"{memory['median']:.0f}"])
        size = path.stat().st_size
    whole, end = results["read the whole file"], results["read its end"]
    readme = [
        (
            f"read a metrics.jsonl of {count:,} lines ({size / 1e6:.0f} MB): CPU seconds, memory",
            f"{whole['seconds']['median']:.2f} s, {whole['peak_mb']['median']:.0f} MB",
        ),
        ("find its end at a start of the run", f"{end['seconds']['median'] * 1e3:.1f} ms"),
    ]
    results |= {"lines": count, "bytes": size, "starts": STARTS}
    report(options.out, results, HEADER, rows, readme)


if __name__ == "__main__":
    main()
