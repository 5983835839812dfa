"""What a search draws: from its seed, and the results that there are."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.sweeps.search.methods import sampler_settings
from mingpt_ddp.sweeps.search.optuna_trials import (
    BaseDistribution,
    Distributions,
    FrozenTrial,
    direction,
    in_memory,
)

DIGITS = 4  # of a drawn float: values are part of the names of directories


def draw(sweep: SweepConfig, space: Distributions, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    """Return the values of the next trial: a function of the seed and the trials before it."""
    with no_warnings():
        towards = direction(objective_named(sweep.metric))
        study = in_memory(towards, trials, _sampler(sweep, len(trials)))
        values = study.ask(dict(sorted(space.items()))).params
    return {key: rounded(values[key], space[key]) for key in space}


def _sampler(sweep: SweepConfig, number: int) -> optuna.samplers.BaseSampler:
    settings = asdict(sampler_settings(sweep))
    seed = seed_of(sweep.seed, number)
    if sweep.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, group=False, constraints_func=None, **settings)
    if sweep.sampler == "gp":
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
