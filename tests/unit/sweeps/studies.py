"""Toy studies: jobs whose losses follow from their values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.space import search_space
from mingpt_ddp.sweeps.search.study import Study

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
    values = study.values(number)
    if study.state(number).is_finished():
        return
    for step in STEPS:
        if study.report(number, step, loss(values, step)):
            study.finish(number, TrialState.PRUNED, None, f"job-{number}")
            return
    if number == 3:
        study.fail(number)
        return
    study.finish(number, TrialState.COMPLETE, loss(values), f"job-{number}")


def run_all(study: Study, trials: int) -> None:
    for number in range(trials):
        run_job(study, number)


def load(directory: Path) -> list[optuna.trial.FrozenTrial]:
    """Read the only study of a journal as Optuna's own tools do."""
    backend = optuna.storages.journal.JournalFileBackend(str(directory / "study.journal"))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name=None, storage=storage).trials


def trials_of(directory: Path) -> list[tuple[Any, ...]]:
    """Return all that is recorded of the trials without their times."""
    return [
        (
            *(trial.number, trial.state.name, trial.params, trial.distributions, trial.values),
            *(list(trial.intermediate_values.items()), trial.user_attrs, trial.system_attrs),
        )
        for trial in load(directory)
    ]


def cut_copy(source: Path, target: Path, size: int) -> Path:
    """Copy a study whose journal ends after some bytes."""
    shutil.copytree(source, target, symlinks=True)
    with open(target / "study.journal", "r+b") as file:
        file.truncate(size)
    return target
