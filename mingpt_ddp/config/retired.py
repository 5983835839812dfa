"""What to do instead of a preset, key, value or command that an earlier version had."""

import functools
from pathlib import Path

import yaml


def retired(word: str) -> str | None:
    """Return one line about a preset, key, value or command of an earlier version; else None."""
    advice = retired_names().get(word)
    return advice and f"{word} is no longer there; {advice}"


@functools.cache
def retired_names() -> dict[str, str]:
    """Return what to do instead: by `group=preset`, `group.key`, `group.key=value` or command.

    Recorded configurations may still have the keys and values.
    """
    return dict(yaml.safe_load(Path(__file__).with_name("retired.yaml").read_text()))
