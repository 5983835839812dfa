"""Optuna's types of studies and trials, and studies in memory."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt_ddp.results.optuna_library import optuna

BaseDistribution = optuna.distributions.BaseDistribution
FrozenTrial = optuna.trial.FrozenTrial
StudyDirection = optuna.study.StudyDirection
TrialState = optuna.trial.TrialState

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


def in_memory(
    towards: Sequence[StudyDirection], trials: Sequence[FrozenTrial], sampler: Any = None
) -> optuna.Study:
    """Return a copy of a study.

    Raises:
        ValueError: a value of a trial lies outside of its distribution.
    """
    study = optuna.create_study(
        storage=optuna.storages.InMemoryStorage(),
        sampler=sampler or optuna.samplers.RandomSampler(0),
        pruner=optuna.pruners.NopPruner(),
        directions=towards,
    )
    study.add_trials(trials)
    return study


def distributions_as_json(distributions: Distributions) -> dict[str, Any]:
    """Return what a study records of each distribution."""
    to_json = optuna.distributions.distribution_to_json
    return {key: json.loads(to_json(each)) for key, each in distributions.items()}
