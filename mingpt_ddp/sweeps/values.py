"""The values of a configuration as plain data: compared, sorted, shown."""

from __future__ import annotations

import json
import math
from typing import Any

Value = bool | int | float | str | None
LONGEST = 60  # characters of a value that are shown
LARGEST = 1e100  # numbers beyond are no coordinates


class Listed(str):
    """A list of scalars, as JSON."""


def plain(value: Any) -> Value:
    """What a YAML file holds as one value; a list of scalars is its JSON."""
    if isinstance(value, list) and len(value) <= 100 and not any(isinstance(v, (list, dict)) for v in value):
        return Listed(json.dumps([plain(v) for v in value]))
    if value is None or isinstance(value, (bool, str)) or is_number(value):
        return value
    return str(value) if isinstance(value, float) else type(value).__name__


def is_number(value: Any) -> bool:
    """Whether it has a place on an axis."""
    return type(value) in (int, float) and abs(value) < LARGEST


def number(value: Any) -> float | None:
    """The finite number that it is, if it is one."""
    return float(value) if is_number(value) else None


def identity(value: Value) -> str:
    """Equal for values that mean the same, such as 1 and 1.0."""
    whole = type(value) is float and is_number(value) and value == int(value)
    return json.dumps(int(value) if whole and value is not None else value)


def order(value: Value) -> tuple[bool, float, str]:
    """A key to sort by: numbers first, by size."""
    return not is_number(value), number(value) or 0.0, shown(value)


def shown(value: Value) -> str:
    """As the command line takes it, but short."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return cut(value, LONGEST)
    return brief(value)


def brief(value: float) -> str:
    """At most four digits, more for whole numbers, and no row of zeros: 0.0003 is 3e-4."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) < 1e9 and value == round(value):
        return f"{value:.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else scientific(value)


def fixed(value: float, form: str) -> str:
    """As the format says, or with an exponent where that would be too long to read."""
    return f"{value:{form}}" if abs(value) < 1e12 else scientific(value)


def scientific(value: float) -> str:
    """At most four digits and an exponent."""
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def short_names(keys: list[str]) -> dict[str, str]:
    """By dotted key its last part, where that is enough to know it by."""
    last = [key.rpartition(".")[2] for key in keys]
    clear = [last.count(name) == 1 and name not in ("name", "path") for name in last]
    return {key: name if alone else key for key, name, alone in zip(keys, last, clear, strict=True)}


def cut(text: str, most: int) -> str:
    """The text, or its beginning in at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def cut_inside(text: str, most: int) -> str:
    """The text, or its beginning and its end in at most so many characters: what is alike often differs at the end."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"
