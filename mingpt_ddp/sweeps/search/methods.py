"""The samplers and pruners by name, with every setting: Optuna's defaults differ by version."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from mingpt_ddp.config.keys.fields import NonNegativeInt, PositiveInt
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.validation import build, check


@dataclass(frozen=True, kw_only=True)
class Tpe:
    """Settings of tpe."""

    n_startup_trials: NonNegativeInt = 10
    n_ei_candidates: PositiveInt = 24
    multivariate: bool = True
    constant_liar: bool = True


@dataclass(frozen=True, kw_only=True)
class Gp:
    """Settings of gp."""

    n_startup_trials: PositiveInt = 10
    deterministic_objective: bool = False


@dataclass(frozen=True, kw_only=True)
class Median:
    """Settings of median."""

    n_startup_trials: NonNegativeInt = 5
    n_warmup_steps: NonNegativeInt = 0
    interval_steps: PositiveInt = 1
    n_min_trials: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class Asha:
    """Settings of asha."""

    min_resource: PositiveInt | None = None  # the step of the first evaluation of all
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    min_early_stopping_rate: NonNegativeInt = 0
    bootstrap_count: NonNegativeInt = 0


@dataclass(frozen=True)
class NoSettings:
    """Of a method that has none."""


Methods = Mapping[str | None, type]
SAMPLERS: Methods = {"tpe": Tpe, "gp": Gp, "random": NoSettings}
PRUNERS: Methods = {"median": Median, "asha": Asha, "none": NoSettings}


def sampler_settings(sweep: SweepConfig) -> Any:
    """Return the settings of the sampler.

    Raises:
        ConfigError: one is unknown or invalid, or there is no sampler.
    """
    return _build(SAMPLERS, "sampler", sweep.sampler, sweep.sampler_settings or {})


def pruner_settings(sweep: SweepConfig) -> Any:
    """Return the settings of the pruner.

    Raises:
        ConfigError: one is unknown or invalid.
    """
    return _build(PRUNERS, "pruner", sweep.pruner, sweep.pruner_settings or {})


def _build(methods: Methods, what: str, name: str | None, given: Mapping[str, Any]) -> Any:
    cls = methods.get(name, NoSettings)
    where = f"sweep.{what}_settings"
    has_settings = bool(fields(cls))
    check(has_settings or not given, f"{where}: sweep.{what}={name or 'null'} has no settings")
    return build(cls, given, where)
