"""Samplers and pruners have the settings of the installed Optuna, and all are documented."""

from __future__ import annotations

import dataclasses
import inspect
import json

import optuna
import pytest

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.study.sweeps.search.methods import PRUNERS, SAMPLERS

# Settings that are deprecated, have equal defaults from Optuna 4.7 on, or are functions.
NOT_OFFERED = {
    "self",
    "seed",
    "group",
    "constraints_func",
    "independent_sampler",
    "gamma",
    "weights",
    "consider_prior",
    "prior_weight",
    "consider_magic_clip",
    "consider_endpoints",
    "warn_independent_sampling",
    "warn_asynchronous_seeding",
    "categorical_distance_func",
}
CLASSES = [
    (SAMPLERS["tpe"], optuna.samplers.TPESampler),
    (SAMPLERS["gp"], optuna.samplers.GPSampler),
    (SAMPLERS["random"], optuna.samplers.RandomSampler),
    (PRUNERS["median"], optuna.pruners.MedianPruner),
    (PRUNERS["asha"], optuna.pruners.SuccessiveHalvingPruner),
]


@pytest.mark.parametrize(("settings", "cls"), CLASSES, ids=lambda each: each.__name__)
def test_every_setting_of_this_optuna_is_known(settings, cls):
    known = inspect.signature(cls.__init__).parameters.keys() - NOT_OFFERED
    assert known == {field.name for field in dataclasses.fields(settings)}


def test_the_reference_has_every_setting_with_its_default():
    metadata = {field.name: field.metadata for field in dataclasses.fields(SweepConfig)}
    for what, methods in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        described = metadata[f"{what}_settings"]["description"]
        for name, settings in methods.items():
            fields = dataclasses.fields(settings)
            defaults = [f"{field.name}: {json.dumps(field.default)}" for field in fields]
            assert not defaults or f"{name}: {{{', '.join(defaults)}}}" in described
