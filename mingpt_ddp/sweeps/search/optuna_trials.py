"""Our records as trials of Optuna."""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt_ddp.results.optuna_library import optuna
from mingpt_ddp.sweeps.search.records import TrialRecord

BaseDistribution = optuna.distributions.BaseDistribution
FrozenTrial = optuna.trial.FrozenTrial
StudyDirection = optuna.study.StudyDirection
TrialState = optuna.trial.TrialState

STATES = {
    None: TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
Distributions = Mapping[str, BaseDistribution]


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
) -> FrozenTrial:
    """Return a record as a trial of Optuna.

    Args:
        distributions: of all keys.
        towards: the directions of the objectives.

    Raises:
        ValueError: a value lies outside of its distribution.
    """
    outcome = record.outcome
    intermediate = {
        step: comparable(each.value, towards[0]) for step, each in record.reports.items()
    }
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
