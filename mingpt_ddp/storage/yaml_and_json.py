"""Read and write the records of a run as YAML and JSON, with limits on their size.

A reader refuses a file that is larger than a limit, because reading an untrusted file must not take
minutes or gigabytes. Writers check the same limits, so that every file they write can be read.
"""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.errors import RunError
from mingpt_ddp.storage.storage import read_regular

MAX_YAML_BYTES = 1 << 22
# An event is a value, or the start or end of a list or mapping. Parsing this many events takes a
# second. For comparison: each entry of data.sources has four events.
MAX_YAML_EVENTS = 100_000
MAX_YAML_DEPTH = 50  # levels of lists and mappings
MAX_JSON_BYTES = 1 << 24
# The time to parse a long number grows with the square of its length, also in base 60 (1:59:59...).
LONG_NUMBER = re.compile(r"[-+0-9_:.]{1000,}")
# The loader of libyaml is ten times as fast as the one in Python.
YAMLLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str | bytes) -> Any:
    """Parse one untrusted YAML document.

    Raises:
        ValueError: The text is not YAML, exceeds a limit or is nested too deeply. Tags that name
            Python objects, very long numbers and aliases are refused too. A few aliases can expand
            to gigabytes.
    """
    size = len(text.encode() if isinstance(text, str) else text)
    if size > MAX_YAML_BYTES:
        raise ValueError(f"it has {size:,} bytes, but at most {MAX_YAML_BYTES:,} can be read")
    try:
        _check_events(text)
        return YAMLLoader(text).get_single_data()
    except Exception as error:  # the constructor of a type may raise any exception
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _check_events(text: str | bytes) -> None:
    """Check limits while the text is parsed, before any value is constructed.

    Raises:
        ValueError: There are too many values, they are nested too deeply, a number is too long, or
            there are aliases.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=YAMLLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.AliasEvent) or depth > MAX_YAML_DEPTH:
            raise ValueError("it has aliases or is nested too deeply")
        if count > MAX_YAML_EVENTS:
            raise ValueError(
                f"it is too long: its values, and the starts and ends of its lists and mappings, "
                f"are more than {MAX_YAML_EVENTS:,}"
            )
        if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0]:
            continue  # a quoted text is not a number
        if LONG_NUMBER.fullmatch(event.value):
            raise ValueError("it has a number of more than 1,000 digits")


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: The path is not a regular file, or the file is too large or cannot be read.
        ValueError: `load_yaml` refuses the content.
    """
    return load_yaml(read_regular(path, MAX_YAML_BYTES))


def dump_yaml(values: Any) -> str:
    """Encode values as YAML.

    Raises:
        ValueError: `load_yaml` would refuse the result, for example because it is too large.
    """
    text = str(yaml.safe_dump(values, sort_keys=False))
    load_yaml(text)
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in an untrusted JSON file, or {} if no object can be read from it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        values = json.loads(read_regular(path, MAX_JSON_BYTES))
        return values if isinstance(values, dict) else {}
    return {}


def finite(value: Any) -> float | None:
    """Return a finite number in an untrusted record as a float. Return None for any other value."""
    with contextlib.suppress(OverflowError):  # an int may be too large for a float
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    return None


def dump_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Encode values as JSON.

    Raises:
        RunError: The result is too large for `read_json`.
    """
    try:
        return check_size(json.dumps(values, indent=indent).encode() + b"\n", MAX_JSON_BYTES)
    except OSError as error:
        raise RunError(f"cannot record {', '.join(values)[:100]}: {error}") from error


def check_size(content: bytes, limit: int) -> bytes:
    """Return the content of a file, if it is not too large for the readers of the file.

    Args:
        limit: Size in bytes above which readers refuse the file.

    Raises:
        OSError: The content is larger.
    """
    if len(content) > limit:
        raise OSError(f"it has {len(content):,} bytes, but at most {limit:,} can be read")
    return content
