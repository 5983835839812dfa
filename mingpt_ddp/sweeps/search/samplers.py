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
    """The default of a setting, and its lowest value, if it is a whole number, or its choices."""

    default: Any
    lowest: int = 0
    choices: tuple[str, ...] = ()


Table = Mapping[str, Mapping[str, Setting]]

SAMPLERS: Table = {
    "tpe": {
        "n_startup_trials": Setting(10),
        "n_ei_candidates": Setting(24, lowest=1),
        "multivariate": Setting(True),
        "constant_liar": Setting(True),
    },
    "gp": {"n_startup_trials": Setting(10, lowest=1), "deterministic_objective": Setting(False)},
    "qmc": {
        "qmc_type": Setting("sobol", choices=("sobol", "halton")),
        "scramble": Setting(True),
    },
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
    if setting.choices:
        check(value in setting.choices, f"{text} must be one of {', '.join(setting.choices)}")
    elif isinstance(setting.default, bool):
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
            study = in_memory(self.directions, self._sampler(len(trials), space))
            study.add_trials(trials)
            values = study.ask(space).params
        return {key: rounded(values[key], self.space[key]) for key in self.space}

    def _sampler(
        self, number: int, space: dict[str, BaseDistribution]
    ) -> optuna.samplers.BaseSampler:
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
        if self.sampler == "qmc":
            return _Sequence(self.seed, number, space, settings)
        return optuna.samplers.RandomSampler(seed)


class _Sequence(optuna.samplers.QMCSampler):
    """Draw trial k as point k of one sequence, from the first trial on."""

    def __init__(
        self, seed: int, number: int, space: dict[str, BaseDistribution], settings: dict[str, Any]
    ) -> None:
        super().__init__(
            seed=seed,
            independent_sampler=optuna.samplers.RandomSampler(seed_of(seed, number)),
            warn_asynchronous_seeding=False,
            warn_independent_sampling=False,
            **settings,
        )
        self._number = number
        self._space = space

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space; Optuna draws the first trial outside of the sequence."""
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Set the counter, which Optuna keeps in the attributes of a study, and draw.

        A choice is the whole part of a float: Optuna 4.7 has no choices in a sequence.
        """
        choices = {
            key: each.choices
            for key, each in search_space.items()
            if isinstance(each, optuna.distributions.CategoricalDistribution)
        }
        floats = {
            key: optuna.distributions.FloatDistribution(0, len(each))
            for key, each in choices.items()
        }
        search_space = {**search_space, **floats}
        super().sample_relative(study, trial, search_space)  # creates the counter
        storage = study._storage
        # its name differs by version; the study is new and has no other attribute
        (counter,) = storage.get_study_system_attrs(study._study_id)
        storage.set_study_system_attr(study._study_id, counter, self._number - 1)
        values = super().sample_relative(study, trial, search_space)
        for key, each in choices.items():
            values[key] = each[min(int(values[key]), len(each) - 1)]
        return values


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
