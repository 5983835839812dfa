"""Optuna's types of studies and trials, and studies in memory."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt_ddp.results.objective import Objective
from mingpt_ddp.results.optuna_library import optuna

BaseDistribution = optuna.distributions.BaseDistribution
FrozenTrial = optuna.trial.FrozenTrial
StudyDirection = optuna.study.StudyDirection
TrialState = optuna.trial.TrialState

Distributions = Mapping[str, BaseDistribution]


def direction(objective: Objective) -> StudyDirection:
    return StudyDirection.MAXIMIZE if objective.maximize else StudyDirection.MINIMIZE


def in_memory(
    towards: StudyDirection, trials: Sequence[FrozenTrial], sampler: Any = None
) -> optuna.Study:
    """Return a copy of a study.

    Raises:
        ValueError: a value of a trial lies outside of its distribution.
    """
    study = optuna.create_study(
        storage=optuna.storages.InMemoryStorage(),
        sampler=sampler or optuna.samplers.RandomSampler(0),
        pruner=optuna.pruners.NopPruner(),
        direction=towards,
    )
    study.add_trials(trials)
    return study


def distributions_as_json(distributions: Distributions) -> dict[str, Any]:
    """Return what a study records of each distribution."""
    to_json = optuna.distributions.distribution_to_json
    return {key: json.loads(to_json(each)) for key, each in distributions.items()}
