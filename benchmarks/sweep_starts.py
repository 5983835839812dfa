"""Seconds to start a sweep whose jobs are all complete.

The directories of a grid and of a search are written here, without training. Each command then
finds all jobs complete, and prints their table.

    python benchmarks/sweep_starts.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, compose_config, log, parser, report, timed

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.storage.run_directory import run_directory, with_run_name
from mingpt_ddp.sweeps.job import job_name
from mingpt_ddp.sweeps.sources import source_of

MAIN = [sys.executable, str(ROOT / "main.py"), "-m"]
RUN = ["data.truncate=0.02", "trainer.max_epochs=null", "trainer.max_steps=20", "tracker=[]"]
LR = "optimizer.lr"
SPACE = f"{LR}=tag(log,interval(1e-4,1e-2))"
SEARCH = ["sweep.sampler=random", SPACE]
HEADER = ["what", "jobs", "seconds"]


def write_job(config: Config, lr: float) -> Path:
    """Write the directory of a complete job, and return it."""
    config = replace(config, optimizer=replace(config.optimizer, lr=lr))
    directory = run_directory(with_run_name(config, job_name(config, {LR: str(lr)})))
    directory.mkdir(parents=True, exist_ok=True)  # values may be drawn twice
    result = {"status": "complete", "step": 20, "val_loss": 2.0 + lr, "wall_seconds": 1.0}
    (directory / "result.json").write_text(json.dumps(result))
    (directory / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    lines = [{"step": step, "val_loss": 3.0 + lr} for step in range(2, 21, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def write_search(config: Config, trials: int) -> None:
    """Write the jobs of a search and their record."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    root = Path(config.run.root, config.run.name or "")
    root.mkdir(parents=True)
    overrides = OverridesParser.create().parse_overrides([*RUN, "run.name=search", SPACE])
    config = replace(config, sweep=replace(config.sweep, sampler="random", trials=trials))
    study = source_of(config, overrides, root, DistEnv()).study
    assert study is not None
    for number in range(trials):
        study.end(number, write_job(config, study.values(number)[LR]))


def start(cwd: Path, words: list[str]) -> float:
    """Return the seconds of a sweep of complete jobs."""
    wall, _ = timed([*MAIN, *RUN, *words], cwd)
    return wall


def main() -> None:
    options = parser(__doc__, "sweep_starts")
    options.add_argument("--jobs", type=int, default=200, help="(default: %(default)s)")
    chosen = options.parse_args()
    n = chosen.jobs
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        cwd = Path(directory)
        config = compose_config(*RUN, f"run.root={cwd / 'outputs'}", "run.name=search")
        write_search(config, n)
        for trials, what in ((1, "search of one job"), (n, "search")):
            command = [*SEARCH, "run.name=search", f"sweep.trials={trials}"]
            seconds[what] = start(cwd, command)
            log(f"{what}: {seconds[what]:.1f} s")
        grid = compose_config(*RUN, f"run.root={cwd / 'outputs'}", "run.name=grid")
        lrs = [round(1e-4 * (1 + i), 6) for i in range(n)]
        for lr in lrs:
            write_job(grid, lr)
        text = ",".join(map(str, lrs))
        seconds["grid"] = start(cwd, ["run.name=grid", f"{LR}={text}"])
        log(f"grid: {seconds['grid']:.1f} s")
    rows = [[what, str(n), f"{value:.1f}"] for what, value in seconds.items()]
    report(chosen.out, {"jobs": n, "seconds": seconds}, HEADER, rows)


if __name__ == "__main__":
    main()
