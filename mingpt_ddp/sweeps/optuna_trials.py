"""Optuna itself, without its log lines and warnings, and our records as its trials."""

import contextlib
import datetime
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.sweeps.records import TrialRecord

try:
    import optuna
except ImportError as import_error:
    raise ConfigError("a search needs Optuna; pip install 'mingpt_ddp[sweep]'") from import_error

BaseDistribution = optuna.distributions.BaseDistribution
FrozenTrial = optuna.trial.FrozenTrial
StudyDirection = optuna.study.StudyDirection
TrialState = optuna.trial.TrialState

OLDEST = (4, 7)
STATES = {
    None: TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
Distributions = Mapping[str, BaseDistribution]

for library in ("optuna", "alembic"):  # a line of theirs for each trial
    logging.getLogger(library).setLevel(logging.ERROR)
if tuple(map(int, optuna.__version__.split(".")[:2])) < OLDEST:
    raise ConfigError(
        f"a search needs Optuna 4.7 or later, here is {optuna.__version__}; "
        "pip install 'mingpt_ddp[sweep]'"
    )


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Hide Python's warnings, as of experimental arguments, whose values the user has chosen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def directions(objectives: Sequence[str]) -> list[StudyDirection]:
    """Return the direction of each objective; -NAME is maximized."""
    return [
        StudyDirection.MAXIMIZE if name.startswith("-") else StudyDirection.MINIMIZE
        for name in objectives
    ]


def comparable(value: float, direction: StudyDirection) -> float:
    """Return the value, or if it is not finite the worst one: Optuna refuses NaN as a result."""
    if math.isfinite(value):
        return value
    return -math.inf if direction == StudyDirection.MAXIMIZE else math.inf


def frozen_trial(
    record: TrialRecord,
    distributions: Distributions,
    towards: Sequence[StudyDirection],
    *,
    as_running: bool = False,
) -> FrozenTrial:
    """Return a record as a trial of Optuna.

    Args:
        distributions: of all keys.
        towards: the directions of the objectives.
        as_running: leave out what the job has reported and how it ended.

    Raises:
        ValueError: a value lies outside of its distribution.
    """
    outcome = None if as_running else record.outcome
    reports = {} if as_running else record.reports
    intermediate = {step: comparable(each.value, towards[0]) for step, each in reports.items()}
    values = None
    if outcome == "complete":
        values = [comparable(*pair) for pair in zip(record.values, towards, strict=True)]
    elif outcome == "pruned" and intermediate:
        values = [intermediate[max(intermediate)]]
    trial = optuna.create_trial(
        state=STATES[outcome],
        values=values,
        params=record.params,
        distributions={key: distributions[key] for key in record.params},
        intermediate_values=intermediate,
        user_attrs=attributes(record) if outcome else {},
    )
    trial.number = record.number
    trial.datetime_start = datetime.datetime.fromtimestamp(record.started)
    if outcome:
        trial.datetime_complete = datetime.datetime.fromtimestamp(record.ended)
    return trial


def attributes(record: TrialRecord) -> dict[str, Any]:
    """Return what Optuna's tools show of a finished trial."""
    named = {"job": record.job, "reason": record.reason}
    return {key: value for key, value in named.items() if value}


def in_memory(towards: Sequence[StudyDirection], sampler: Any = None) -> optuna.Study:
    """Return an empty study."""
    return optuna.create_study(
        storage=optuna.storages.InMemoryStorage(),
        sampler=sampler or optuna.samplers.RandomSampler(0),
        pruner=optuna.pruners.NopPruner(),
        directions=towards,
    )


def distributions_as_json(distributions: Distributions) -> dict[str, Any]:
    """Return what the records hold of each distribution."""
    to_json = optuna.distributions.distribution_to_json
    return {key: json.loads(to_json(each)) for key, each in distributions.items()}
