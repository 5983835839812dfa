"""Settings of samplers and pruners, and drawn values."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import subprocess
import sys
import warnings

import pytest

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.sweeps.search.methods import PRUNERS, SAMPLERS
from mingpt_ddp.sweeps.search.optuna_trials import TrialState, optuna
from mingpt_ddp.sweeps.search.trial_values import rounded, seed_of
from tests.unit.sweeps.studies import open_study, run_all

Float = optuna.distributions.FloatDistribution
# Deprecated, with equal defaults from Optuna 4.7 on, or functions.
NOT_OFFERED = {
    *("self", "seed", "group", "constraints_func", "independent_sampler", "gamma", "weights"),
    *("consider_prior", "prior_weight", "consider_magic_clip", "consider_endpoints"),
    *("warn_independent_sampling", "warn_asynchronous_seeding", "categorical_distance_func"),
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


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (0.0012345678, 1e-5, 1, 0.001235),
        (9.9999999, 0, 10, 10.0),
        (0.99999999, 0, 0.99999, 0.99999),
        (1.000012345, 1, 1.0001, 1.00001235),
        (-123456.7, -1e6, 1e6, -123500.0),
        (0.0, -1, 1, 0.0),
    ],
)
def test_drawn_floats_are_short(value, low, high, expected):
    assert rounded(value, Float(low, high)) == expected


def test_a_drawn_number_with_a_step_is_the_decimal_that_is_meant():
    stepped = Float(0.1, 0.4, step=0.1)
    assert 0.1 + 2 * 0.1 != 0.3
    assert [rounded(0.1 + k * 0.1, stepped) for k in range(4)] == [0.1, 0.2, 0.3, 0.4]


def test_seeds_are_stable():
    assert [seed_of(1, number) for number in range(2)] == [1330067697, 2774662235]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.filterwarnings("error")
def test_optuna_says_nothing(tmp_path, sampler, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    settings = {"n_startup_trials": 2} if sampler in ("tpe", "gp") else None
    if sampler == "gp":
        settings["deterministic_objective"] = True
    with warnings.catch_warnings(record=True) as caught:
        study = open_study(
            tmp_path, sampler=sampler, sampler_settings=settings, pruner="median", parallel=2
        )
        run_all(study, 4)
        study.values(4)
        study.report(4, 10, 1.0)
        study.finish(4, TrialState.COMPLETE, 1.0, "job-4")
        study.values(5)
    assert not caught
    assert capfd.readouterr() == ("", "")
    assert not [each for each in caplog.records if not each.name.startswith("mingpt_ddp")]


def test_without_optuna(tmp_path):
    (tmp_path / "optuna.py").write_text("raise ImportError('as if it were not installed')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import mingpt_ddp.sweeps.sweep\n"
        "assert 'optuna' not in sys.modules\n"
        "from mingpt_ddp.errors import ConfigError\n"
        "for name in ('space', 'trial_values', 'study'):\n"
        "    try:\n"
        "        __import__(f'mingpt_ddp.sweeps.search.{name}')\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = "config error: a search needs Optuna; pip install 'mingpt_ddp[sweep]'"
    assert ran.stdout.splitlines() == [line] * 3
