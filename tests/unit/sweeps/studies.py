"""Toy studies: jobs whose losses follow from their values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from mingpt_ddp.config.sweep_config import SweepConfig
from mingpt_ddp.sweeps.search.space import search_space
from mingpt_ddp.sweeps.search.study import Outcome, Study

SWEPT = ("lr=tag(log,interval(1e-5,1))", "n=int(interval(1,9))", "kind=a,b,1")
STEPS = (10, 30, 90)


def parse(*overrides: str) -> list[Any]:
    return OverridesParser.create().parse_overrides(list(overrides))


def open_study(directory: Path, *swept: str, **settings: Any) -> Study:
    settings = {"sampler": "random", **settings}
    study = Study(directory, SweepConfig(**settings), search_space(parse(*(swept or SWEPT))))
    study.begin()
    return study


def loss(values: dict[str, Any], step: int = 1000) -> float:
    return float(abs(values["lr"] - 0.01) * values["n"] + (values["kind"] == "a") + 1 / step)


def run_job(study: Study, number: int) -> None:
    """Run a trial; number 3 fails."""
    values = study.trial(number).values
    if study.outcome(number) is not None:
        return
    for step in STEPS:
        reason = study.report(number, step, loss(values, step)) if one_objective(study) else None
        if reason:
            study.finish(number, Outcome.PRUNED, reason=reason, job=f"job-{number}")
            return
    if number == 3:
        study.finish(number, Outcome.FAILED, reason="exit code 1", job=f"job-{number}")
        return
    results = [loss(values)] if one_objective(study) else [loss(values), float(values["n"])]
    study.finish(number, Outcome.COMPLETE, results, job=f"job-{number}")


def one_objective(study: Study) -> bool:
    assert study._records.header is not None
    return len(study._records.header.objectives) == 1


def run_all(study: Study, trials: int) -> None:
    for number in range(trials):
        run_job(study, number)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """Return the records without their times."""
    lines = [json.loads(line) for line in (directory / "trials.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def cut_copy(source: Path, target: Path, size: int) -> Path:
    """Copy a study whose records end after some bytes."""
    shutil.copytree(source, target, symlinks=True)
    with open(target / "trials.jsonl", "r+b") as file:
        file.truncate(size)
    return target
