"""The samplers of a search by name, with every setting: Optuna's defaults differ by version."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from mingpt_ddp.config.validation import check, hint_at
from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.sweeps.search.optuna_trials import (
    BaseDistribution,
    Distributions,
    FrozenTrial,
    StudyDirection,
    in_memory,
)

DIGITS = 4  # of a drawn float: values are part of the names of directories


@dataclass(frozen=True)
class Setting:
    """The default of a setting, and its lowest value, if it is a whole number."""

    default: Any
    lowest: int = 0


Table = Mapping[str, Mapping[str, Setting]]

SAMPLERS: Table = {
    "tpe": {
        "n_startup_trials": Setting(10),
        "n_ei_candidates": Setting(24, lowest=1),
        "multivariate": Setting(True),
        "constant_liar": Setting(True),
    },
    "gp": {"n_startup_trials": Setting(10, lowest=1), "deterministic_objective": Setting(False)},
    "random": {},
}


def with_defaults(table: Table, what: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a sampler or a pruner.

    Args:
        what: sampler or pruner, for messages.

    Raises:
        ConfigError: a setting is unknown or has an invalid value.
    """
    known = table[name]
    for key, value in given.items():
        where = f"sweep.{what}_settings.{key}"
        if not known:
            check(False, f"{where}: sweep.{what}={name} has no settings")
        hint = hint_at(str(key), known, f"sweep.{what}_settings.")
        check(key in known, f"{where} is not a setting of sweep.{what}={name}; {hint}")
        _check_value(f"{where}={value}", known[key], value)
    return {key: given.get(key, setting.default) for key, setting in known.items()}


def _check_value(text: str, setting: Setting, value: Any) -> None:
    if isinstance(setting.default, bool):
        check(isinstance(value, bool), f"{text} must be true or false")
    elif value is not None or setting.default is not None:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        is_valid = is_number and setting.lowest <= value < 2**31
        check(is_valid, f"{text} must be a whole number of at least {setting.lowest}")


def check_sampler(name: str, given: Mapping[str, Any]) -> None:
    """Check the settings of a sampler.

    Raises:
        ConfigError: one is unknown or invalid.
    """
    with_defaults(SAMPLERS, "sampler", name, given)


@dataclass(frozen=True)
class Drawing:
    """What draws the trials of a study."""

    sampler: str
    settings: Mapping[str, Any]
    seed: int
    space: Distributions
    directions: Sequence[StudyDirection]

    def draw(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Return the values of the next trial: a function of the seed and the trials before it."""
        space = dict(sorted(self.space.items()))
        with no_warnings():
            study = in_memory(self.directions, trials, self._sampler(len(trials)))
            values = study.ask(space).params
        return {key: rounded(values[key], self.space[key]) for key in self.space}

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        given = dict(self.settings)
        if self.sampler == "tpe" and len(self.directions) > 1:  # as Optuna 5 does
            given.setdefault("multivariate", False)
        settings = with_defaults(SAMPLERS, "sampler", self.sampler, given)
        seed = seed_of(self.seed, number)
        if self.sampler == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed, group=False, constraints_func=None, **settings
            )
        if self.sampler == "gp":
            return optuna.samplers.GPSampler(
                seed=seed,
                independent_sampler=optuna.samplers.RandomSampler(seed),
                constraints_func=None,
                warn_independent_sampling=False,
                **settings,
            )
        return optuna.samplers.RandomSampler(seed)


def seed_of(seed: int, number: int) -> int:
    """Return the sampler's seed for a trial, of 32 bits as NumPy takes it."""
    digest = hashlib.sha256(f"sweep {seed} trial {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def rounded(value: Any, distribution: BaseDistribution) -> Any:
    """Round a drawn float to four significant digits, or more if the interval is narrow.

    With a step return the decimal number that is meant, 0.3 for 0.1 + 2 * 0.1.
    """
    if not isinstance(distribution, optuna.distributions.FloatDistribution):
        return value
    low, high = distribution.low, distribution.high
    if distribution.step is not None:
        steps = round((value - low) / distribution.step)
        return float(Decimal(str(low)) + steps * Decimal(str(distribution.step)))
    if value == 0:
        return value
    digits = DIGITS
    magnitude = math.floor(math.log10(abs(value))) + 1
    while digits < 17 and 10.0 ** (magnitude - digits) > (high - low) / 1000:
        digits += 1
    return min(max(float(f"{value:.{digits}g}"), low), high)
