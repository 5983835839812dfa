"""Records of a run as YAML and JSON: what is written can be read again.

A reader refuses what is larger than its limit, because a stranger's file must cost neither minutes
nor gigabytes. So writers check the same limit.
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
MAX_YAML_EVENTS = 100_000  # which take a second; a text of data.sources has four
MAX_YAML_DEPTH = 50  # levels of lists and mappings
MAX_JSON_BYTES = 1 << 24
# Long ones take a time that grows with the square of their length: 1:59:59... is in base 60.
LONG_NUMBER = re.compile(r"[-+0-9_:.]{1000,}")
YAMLLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


def load_yaml(text: str | bytes) -> Any:
    """Parse one untrusted YAML document.

    Raises:
        ValueError: it is not YAML, is larger than the limits, or has tags that name objects,
            aliases (a few expand to gigabytes), deep nesting or endless numbers.
    """
    size = len(text.encode() if isinstance(text, str) else text)
    if size > MAX_YAML_BYTES:
        raise ValueError(f"it has {size:,} bytes, of which at most {MAX_YAML_BYTES:,} are read")
    try:
        _check_events(text)
        return YAMLLoader(text).get_single_data()
    except Exception as error:  # from the scanner, or from the constructor of any type
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _check_events(text: str | bytes) -> None:
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=YAMLLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.AliasEvent) or depth > MAX_YAML_DEPTH:
            raise ValueError("it has aliases or is nested too deeply")
        if count > MAX_YAML_EVENTS:
            raise ValueError(f"it has more than {MAX_YAML_EVENTS:,} values, begins and ends")
        if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0]:
            continue  # quoted, so no number
        if LONG_NUMBER.fullmatch(event.value):
            raise ValueError("it has a number of more than 1,000 digits")


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: it is not a regular file, is too large or cannot be read.
        ValueError: see `load_yaml`.
    """
    return load_yaml(read_regular(path, MAX_YAML_BYTES))


def dump_yaml(values: Any) -> str:
    """Return values as YAML that `load_yaml` reads.

    Raises:
        ValueError: it would not.
    """
    text = str(yaml.safe_dump(values, sort_keys=False))
    load_yaml(text)
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        values = json.loads(read_regular(path, MAX_JSON_BYTES))
        return values if isinstance(values, dict) else {}
    return {}


def finite(value: Any) -> float | None:
    """Return a number of an untrusted record as a float; None for anything else."""
    with contextlib.suppress(OverflowError):  # an int that no float holds
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    return None


def dump_json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Return values as JSON that `read_json` reads.

    Raises:
        RunError: they are too large for that.
    """
    try:
        return check_size(json.dumps(values, indent=indent).encode() + b"\n", MAX_JSON_BYTES)
    except OSError as error:
        raise RunError(f"cannot record {', '.join(values)[:100]}: {error}") from error


def check_size(content: bytes, limit: int) -> bytes:
    """Return the content of a file that is read up to a limit.

    Raises:
        OSError: it is larger.
    """
    if len(content) > limit:
        raise OSError(f"it has {len(content):,} bytes, of which at most {limit:,} would be read")
    return content
