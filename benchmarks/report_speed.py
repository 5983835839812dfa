"""Measure the CPU time of `report` for 1,000 jobs, and of `report compare` for 500 settings.

The script writes the files of 1,000 complete jobs that differ in three keys, and of 500 learning
rates with three seeds each. A job has a whole configuration, 200 lines of metrics.jsonl and a
result. Each repetition runs the commands in new processes. If another checkout is given, its
commands and ours alternate.

    python benchmarks/report_speed.py [--other DIR]
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, alternate, cell, compose_config, parser, report, spread, timed

JOBS = 1000
SETTINGS = 500
SEEDS = 3
STEPS = 200
HEADER = ["what", "checkout", "CPU seconds", "seconds"]


def write_run(directory: Path, config: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Write the files of a complete run.

    Args:
        directory: Directory of the run.
        config: The configuration.
        values: Values that replace those of the configuration, by dotted key.
    """
    copy = {group: dict(keys) for group, keys in config.items()}
    for key, value in values.items():
        group, _, name = key.partition(".")
        copy[group][name] = value
    draw = random.Random(str(directory))
    loss = 2 + math.log10(values["optimizer.lr"] / 3e-3) ** 2 / 10 + draw.gauss(0, 0.02)
    lines = [{"start": 1.7e9, "step": 0, "world_size": 1}]
    for step in range(1, STEPS + 1):
        at = loss + 2 * math.exp(-step / 40)
        lines.append({"step": step, "train_loss": at, "lr": 1e-3, "tokens_per_s": 4e4})
        if step % 20 == 0:
            lines.append({"step": step, "val_loss": at})
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(copy))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"status": "complete", "step": STEPS, "val_loss": loss, "wall_seconds": 60.0}
    (directory / "result.json").write_text(json.dumps(result))


def write_runs(root: Path) -> None:
    """Write the runs for `report` and for `report compare`."""
    config = compose_config().to_dict()
    for number in range(JOBS):
        values = {"optimizer.lr": 1e-4 * 1.005**number, "model.n_layer": 1 + number % 4}
        values["optimizer.weight_decay"] = number % 5 / 10
        write_run(root / "jobs" / f"{number}", config, values)
    for number in range(SETTINGS * SEEDS):
        values = {"optimizer.lr": 1e-4 * 1.01 ** (number // SEEDS), "run.seed": number % SEEDS}
        write_run(root / "settings" / f"{number}", config, values)


def main() -> None:
    arguments = parser(__doc__, "report_speed")
    arguments.add_argument("--other", type=Path, help="another checkout of the project")
    arguments.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    options = arguments.parse_args()
    checkouts = {"this": ROOT}
    if options.other:
        checkouts["other"] = options.other.resolve()
    questions = {
        f"`report` of {JOBS:,} jobs": ["jobs"],
        f"`report compare` of {SETTINGS} settings of {SEEDS} seeds": ["settings", "compare"],
    }
    results: dict[str, Any] = {}
    rows = []
    readme = []
    with tempfile.TemporaryDirectory() as scratch:
        write_runs(Path(scratch))
        for what, (name, *words) in questions.items():
            command = [
                sys.executable,
                "-m",
                "mingpt_ddp",
                "report",
                str(Path(scratch, name)),
                *words,
            ]
            ways = {each: partial(timed, command, path) for each, path in checkouts.items()}
            measured = alternate(what, ways, options.repetitions)
            results[what] = {}
            for each, times in measured.items():
                wall, cpu = map(spread, zip(*times, strict=True))
                results[what][each] = {"cpu": cpu, "wall": wall}
                rows.append([what, each, cell(cpu, ".1f"), cell(wall, ".1f")])
            readme.append((what, f"{cell(results[what]['this']['cpu'], '.1f')} s of CPU time"))
    report(options.out, results, HEADER, rows, readme)


if __name__ == "__main__":
    main()
