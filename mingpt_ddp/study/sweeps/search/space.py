"""Turn Hydra's sweep overrides into Optuna's distributions, and round the drawn values."""

import math
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.study.sweeps.checks import expand
from mingpt_ddp.study.sweeps.search.optuna_library import optuna

BaseDistribution = optuna.distributions.BaseDistribution
CategoricalDistribution = optuna.distributions.CategoricalDistribution
FloatDistribution = optuna.distributions.FloatDistribution
IntDistribution = optuna.distributions.IntDistribution

# Significant digits of a drawn float. Few digits keep the names of job directories short.
SIGNIFICANT_DIGITS = 4
MAX_INT = 2**53  # Optuna computes with floats, which hold whole numbers exactly up to here


def search_space(overrides: list[Override]) -> dict[str, BaseDistribution]:
    """Return the distribution of each swept key. If a key has several overrides, the last counts.

    The keys are sorted, so that the draws do not depend on the order of the command line.

    Raises:
        ConfigError: An override does not describe a distribution.
    """
    by_key = {override.get_key_element(): override for override in overrides}
    space = {}
    for key, override in sorted(by_key.items()):
        if override.is_sweep_override():
            try:
                space[key] = _distribution(override)
            except (ValueError, ArithmeticError) as error:  # raised by Optuna, or by decimal
                raise ConfigError(f"{override.input_line}: {error}") from error
    return space


def _distribution(override: Override) -> BaseDistribution:
    sweep: Any = override.value()
    line = override.input_line
    tags: set[str] = getattr(sweep, "tags", set())
    check(tags <= {"log"}, f"{line}: the tag must be log, not {', '.join(sorted(tags))}")
    check(not tags or isinstance(sweep, IntervalSweep), f"{line}: tag(log, ...) needs an interval")
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None and sweep.end is not None
        return _numbers(line, sweep.start, sweep.end, log="log" in tags)
    if isinstance(sweep, RangeSweep):
        return _range(line, sweep)
    # Sort the choices, because shuffle() would give them another order at the next start.
    texts = {word.partition("=")[2] for word in expand(override)}
    return CategoricalDistribution(sorted(texts))


def _numbers(
    line: str | None, low: float, high: float, *, log: bool = False, step: float | None = None
) -> BaseDistribution:
    if isinstance(low, int) and isinstance(high, int):
        check(
            max(-low, high) <= MAX_INT,
            f"{line}: whole numbers must lie between -{MAX_INT} and {MAX_INT}",
        )
        return IntDistribution(low, high, log=log, step=int(step or 1))
    check(math.isfinite(high - low), f"{line}: both ends and their difference must be finite")
    return FloatDistribution(low, high, log=log, step=step)


def _range(line: str | None, sweep: RangeSweep) -> BaseDistribution:
    ends: tuple[Any, ...] = (sweep.start, sweep.stop, sweep.step)
    for cast in getattr(sweep, "transformers", ()):  # Hydra 1.3 has already cast the ends
        ends = tuple(map(cast, ends))
    # Count in decimals. Binary floats would lose the last value of some ranges, or add one.
    start, stop, step = (Decimal(str(end)) for end in ends)
    count = math.ceil((stop - start) / step)
    check(count >= 1, f"{line} has no values; change its start, stop or step")
    number = int if all(isinstance(end, int) for end in ends) else float
    low, high = sorted((start, start + (count - 1) * step))
    return _numbers(line, number(low), number(high), step=number(abs(step)))


def describe(distribution: BaseDistribution) -> str:
    """Describe a distribution for messages and for the record of the search.

    Different distributions have different descriptions.
    """
    if isinstance(distribution, CategoricalDistribution):
        return f"choice({','.join(map(str, distribution.choices))})"
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    text = f"interval({distribution.low},{distribution.high})"
    default_step = None  # floats have no step, and whole numbers have a step of 1
    if isinstance(distribution, IntDistribution):
        text, default_step = f"int({text})", 1
    if distribution.log:
        text = f"tag(log,{text})"
    has_default_step = distribution.step == default_step
    return text if has_default_step else f"{text} in steps of {distribution.step}"


def rounded(value: Any, distribution: BaseDistribution) -> Any:
    """Round a drawn float to four significant digits, or to more if the interval is narrow.

    If the distribution has steps, return the exact decimal number: 0.3, although 0.1 + 2 * 0.1 is
    slightly more.
    """
    if not isinstance(distribution, FloatDistribution) or value == 0 or distribution.single():
        return value
    low, high, step = distribution.low, distribution.high, distribution.step
    if step is not None:
        return float(Decimal(str(low)) + round((value - low) / step) * Decimal(str(step)))
    magnitude = math.floor(math.log10(abs(value))) + 1
    digits = max(SIGNIFICANT_DIGITS, magnitude - math.floor(math.log10((high - low) / 1000)))
    return min(max(float(f"{value:.{digits}g}"), low), high)
