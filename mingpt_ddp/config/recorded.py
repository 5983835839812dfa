"""Adapt the recorded configuration of a run to this version, and find values not to trust."""

from typing import Any

from mingpt_ddp.config.config import DEFAULT_CHOICE, GROUPS_ADDED_LATER, KEYS, default_values
from mingpt_ddp.config.keys.schema import BASES, GROUPS, selected
from mingpt_ddp.config.validation import field_types

# Keys of the places where a run stores files. No two runs share all of them.
PLACES = ("run.root", "run.name", "data.cache_dir", "snapshot.path")
# A stranger who wrote the record could use these keys to receive the user's files.
UNTRUSTED = (*PLACES, "run.resume", "tracker.entity", "tracker.uri")
# Earlier versions of this package recorded this key in each group with code of the user. It is not
# a setting.
CODE_SHA256 = "code_sha256"


def with_data_format(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the key `data.format`.

    Versions without this key read any UTF-8 file as text.
    """
    data = values["data"]
    if "dataset" in data or "format" in data:
        return values
    return {**values, "data": {**data, "format": "text"}}


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration as this version would have recorded it.

    Newer keys get their defaults, and removed keys are dropped. If a user's class is not
    registered, the keys of its base class are added.
    """
    filled = {}
    # Recorded values come first to keep their order, and again last to replace the defaults.
    for group, keys in without_unknown({**values, **GROUPS_ADDED_LATER, **values}).items():
        selector, _ = selected(group, keys)
        base = BASES["dataset" if selector == "dataset" else group] if selector else None
        cls = class_of(group, keys) or base
        filled[group] = keys | (default_values(cls) if cls else {}) | keys
    return filled


def without_unknown(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration without the keys that this version does not know.

    A group with code of the user keeps all its keys, so that a later check refuses a key that the
    code no longer has. The group `data` never keeps unknown keys, because a run detects
    changed data by its content.
    """
    known = {}
    for group, keys in values.items():
        if group not in GROUPS:
            continue
        cls = class_of(group, keys)
        has_code = group != "data" and keys.get("code") is not None
        known[group] = keys
        if cls is not None:
            names = {*keys} - {CODE_SHA256} if has_code else field_types(cls)
            known[group] = {key: value for key, value in keys.items() if key in names}
    return known


def is_untrusted(key: str, value: Any) -> bool:
    """Return True if a recorded value could run a program or send files somewhere."""
    if key in UNTRUSTED or key.endswith(".code"):
        return True
    is_url = "://" in str(value) and not key.startswith("data.")
    return is_url or "::" in str(value)  # fsspec chains file systems with ::


def untrusted_values(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded values that are used only if the user confirms them.

    Defaults are left out, because they are harmless. `run.root` and `run.name` are left out,
    because the run directory determines them.

    Args:
        recorded: A configuration by dotted key.
    """
    found = {}
    for key, value in recorded.items():
        is_default = value is None or (key in KEYS and value == KEYS[key].default)
        if not is_default and key not in ("run.root", "run.name") and is_untrusted(key, value):
            found[key] = value
    return found


def class_of(group: str, keys: dict[str, Any]) -> type | None:
    """Return the dataclass of a group's keys, or None if the selected name is not registered."""
    _, choice = selected(group, keys)
    return GROUPS[group][1].get(DEFAULT_CHOICE.get(group) if choice is None else str(choice))
