"""Check the settings of samplers and pruners, and build them with Optuna.

Every setting has its default here, because Optuna's defaults differ by version.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.fields import NonNegativeInt, PositiveInt
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.validation import build, check
from mingpt_ddp.study.sweeps.search.optuna_library import no_warnings, optuna


@dataclass(frozen=True, kw_only=True)
class Tpe:
    """Settings of sweep.sampler=tpe."""

    n_startup_trials: NonNegativeInt = 10
    n_ei_candidates: PositiveInt = 24
    multivariate: bool = True
    constant_liar: bool = True


@dataclass(frozen=True, kw_only=True)
class Gp:
    """Settings of sweep.sampler=gp."""

    n_startup_trials: PositiveInt = 10
    deterministic_objective: bool = False


@dataclass(frozen=True, kw_only=True)
class Median:
    """Settings of sweep.pruner=median."""

    n_startup_trials: NonNegativeInt = 5
    n_warmup_steps: NonNegativeInt = 0
    interval_steps: PositiveInt = 1
    n_min_trials: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class Asha:
    """Settings of sweep.pruner=asha."""

    min_resource: PositiveInt | None = None  # None stands for trainer.eval_every
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    min_early_stopping_rate: NonNegativeInt = 0
    bootstrap_count: NonNegativeInt = 0


@dataclass(frozen=True)
class NoSettings:
    """Empty settings, for a sampler or pruner that has none."""


Methods = Mapping[str | None, type]
SAMPLERS: Methods = {"tpe": Tpe, "gp": Gp, "random": NoSettings}
PRUNERS: Methods = {"median": Median, "asha": Asha, "none": NoSettings}


def sampler(sweep: SweepConfig, trial: int) -> optuna.samplers.BaseSampler:
    """Make the sampler for one trial.

    Each trial has a sampler of its own, whose seed depends on the number of the trial. A single
    sampler for all trials would repeat its draws after a restart.

    Args:
        trial: Number of the trial.

    Raises:
        ConfigError: A setting is unknown or invalid.
    """
    settings = _settings(SAMPLERS, "sampler", sweep.sampler, sweep.sampler_settings)
    digest = hashlib.sha256(f"sweep {sweep.seed} trial {trial}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")  # NumPy takes a seed of 32 bits
    with no_warnings():
        if sweep.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, **settings)
        if sweep.sampler == "gp":
            return optuna.samplers.GPSampler(seed=seed, **settings)
        return optuna.samplers.RandomSampler(seed)


def pruner(config: Config) -> optuna.pruners.BasePruner:
    """Make the pruner for a search.

    Raises:
        ConfigError: A setting is unknown or invalid.
    """
    sweep = config.sweep
    settings = _settings(PRUNERS, "pruner", sweep.pruner, sweep.pruner_settings)
    if sweep.pruner == "median":
        return optuna.pruners.MedianPruner(**settings)
    if sweep.pruner == "asha":
        settings["min_resource"] = settings["min_resource"] or config.trainer.eval_every or 1
        return optuna.pruners.SuccessiveHalvingPruner(**settings)
    return optuna.pruners.NopPruner()


def _settings(
    methods: Methods, what: str, name: str | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    cls = methods[name]
    where = f"sweep.{what}_settings"
    check(bool(fields(cls)) or not given, f"{where}: sweep.{what}={name} has no settings")
    return asdict(build(cls, given or {}, where))
