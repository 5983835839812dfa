"""The space of a search: Hydra's sweep overrides as Optuna's distributions."""

import contextlib
import itertools
import json
import math
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
    Transformer,
)
from hydra.errors import HydraException

from mingpt_ddp.config.validation import check
from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.storage.yaml_and_json import finite
from mingpt_ddp.sweeps.checks import expand
from mingpt_ddp.sweeps.search.optuna_trials import BaseDistribution

CategoricalDistribution = optuna.distributions.CategoricalDistribution
FloatDistribution = optuna.distributions.FloatDistribution
IntDistribution = optuna.distributions.IntDistribution

MAX_CHOICES = 10_000  # of a range of floats, all of which Hydra lists
MAX_INT = 2**53  # Optuna computes with floats
SCALARS = (bool, int, float)


def search_space(overrides: list[Override]) -> dict[str, BaseDistribution]:
    """Return the distribution of each key that is swept; the last override of a key counts.

    Raises:
        ConfigError: a sweep is invalid, or has one value.
    """
    by_key = {override.get_key_element(): override for override in overrides}
    return {
        key: _distribution(override)
        for key, override in by_key.items()
        if override.is_sweep_override()
    }


def grid(overrides: list[Override]) -> tuple[list[dict[str, Any]], dict[str, BaseDistribution]]:
    """Return the values of each job of a grid, and for Optuna's tools those of each key.

    Args:
        overrides: those that are swept.
    """
    pairs = [list(map(_key_and_value, expand(override))) for override in overrides]
    space: dict[str, BaseDistribution] = {}
    for (key, first), *others in pairs:
        choices = dict.fromkeys([first, *(value for _, value in others)])
        space[key] = CategoricalDistribution([*choices])
    return list(map(dict, itertools.product(*pairs))), space


def _key_and_value(word: str) -> tuple[str, Any]:
    """Return the key of an override, and its value; as text unless it is a number."""
    key, _, text = word.partition("=")
    with contextlib.suppress(ValueError):
        number = json.loads(text)
        if finite(number) is not None:
            return key, number
    return key, text


def override_text(key: str, value: Any) -> str:
    """Return an override that Hydra parses to this value.

    Text that Hydra reads as one value, such as `[1,2]`, stays as it is; other text is quoted.
    """
    if isinstance(value, str) and not _is_one_value(value):
        value = QuotedString(text=value, quote=_quote(value)).with_quotes()
    elif not isinstance(value, str):
        value = Transformer.str(value)
    return f"{key}={value}"


def _quote(text: str) -> Quote:
    return Quote.double if "'" in text and '"' not in text else Quote.single


def _parse(text: str) -> Override | None:
    """Return the override of a value; None if Hydra cannot parse it."""
    try:
        return OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return None


def _is_one_value(text: str) -> bool:
    override = _parse(text)
    return override is not None and not override.is_sweep_override()


def _distribution(override: Override) -> BaseDistribution:
    sweep = override.value()
    tags: set[str] = getattr(sweep, "tags", set())
    line = str(override.input_line)
    unknown = sorted(tags - {"log"})
    check(not unknown, f"{line}: the only tag is log, not {', '.join(unknown)}")
    if isinstance(sweep, IntervalSweep):
        return _interval(line, sweep)
    check(not tags, f"{line}: tag(log, ...) needs an interval")
    if isinstance(sweep, RangeSweep):
        return _range(line, sweep)
    return _choice(line, _choices(override))


def _interval(line: str, sweep: IntervalSweep) -> BaseDistribution:
    low, high = sweep.start, sweep.end
    is_log = "log" in sweep.tags
    assert low is not None and high is not None
    check(math.isfinite(low) and math.isfinite(high), f"{line}: both ends must be finite")
    check(low < high, f"{line}: the first end must be less than the second")
    check(low > 0 or not is_log, f"{line}: a logarithmic interval begins above 0")
    if isinstance(low, int) and isinstance(high, int):
        check(max(-low, high) <= MAX_INT, f"{line}: whole numbers end at {MAX_INT}")
        return IntDistribution(low, high, log=is_log)
    check(math.isfinite(high - low), f"{line}: the ends are too far apart")
    return FloatDistribution(low, high, log=is_log)


def _range(line: str, sweep: RangeSweep) -> BaseDistribution:
    assert sweep.start is not None and sweep.stop is not None
    ends: tuple[Any, ...] = (sweep.start, sweep.stop, sweep.step)
    for cast in getattr(sweep, "transformers", ()):  # Hydra 1.3 has cast them itself
        ends = tuple(map(cast, ends))
    # as typed: in binary the step is not exact, and Hydra 1.3 may add a value behind the last
    start, stop, step = (Decimal(str(end)) for end in ends)
    is_valid = all(end.is_finite() for end in (start, stop, step)) and step != 0
    check(is_valid, f"{line}: is not a range of numbers")
    count = math.ceil((stop - start) / step)
    check(count >= 1, f"{line} is empty")
    check(count > 1, f"{line} has one value; give that value, or a longer range")
    low, high = sorted((start, start + (count - 1) * step))
    if all(isinstance(end, int) for end in ends):
        check(max(map(abs, ends)) <= MAX_INT, f"{line}: whole numbers end at {MAX_INT}")
        return IntDistribution(int(low), int(high), step=int(abs(step)))
    check(count <= MAX_CHOICES, f"{line} has {count} values; write interval(...)")
    is_wide = float(low) < float(high)
    check(is_wide, f"{line} has one value; give that value, or a longer range")
    return FloatDistribution(float(low), float(high), step=float(abs(step)))


def _choices(override: Override) -> list[Any]:
    """Return the values in the order of the command line, also of a shuffle or a glob."""
    listed = getattr(override.value(), "list", None)
    return list(override.sweep_iterator()) if listed is None else listed


def _choice(line: str, values: list[Any]) -> BaseDistribution:
    choices = list(dict.fromkeys(_with_type(_override_value(value)) for value in values))
    check(len(choices) > 0, f"{line} has no values to search")
    check(len(choices) > 1, f"{line} has one value; give that value alone, or more")
    plain = [value for _, value in choices]
    # Optuna compares choices with ==, which takes 1, 1.0 and true for the same
    plain = [_text(value) if plain.count(value) > 1 else value for value in plain]
    with no_warnings():
        return CategoricalDistribution(plain)


def _with_type(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


def _override_value(value: Any) -> bool | int | float | str | None:
    """Return a scalar, or the text of an override for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, SCALARS):
        return value
    if not isinstance(value, QuotedString):
        return str(Transformer.str(value))
    parsed = _parse(value.text)
    is_same = parsed is not None and parsed.value() == value.text
    return value.text if is_same else value.with_quotes()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(Transformer.str(value))
