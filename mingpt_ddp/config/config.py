"""The whole configuration: Hydra's DictConfig in, frozen dataclasses out, and their digest."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.hints import known_keys, suggest
from mingpt_ddp.config.keys.components import DatasetConfig, TaskConfig
from mingpt_ddp.config.keys.fields import Effect, enters_name
from mingpt_ddp.config.keys.model_config import ModelConfig
from mingpt_ddp.config.keys.optimizer_config import OptimizerConfig
from mingpt_ddp.config.keys.schema import (
    BASES,
    GROUPS,
    DDPConfig,
    RunConfig,
    SnapshotConfig,
    TrackerConfig,
    selected,
)
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.validation import NotRegisteredError, build, check, field_types
from mingpt_ddp.errors import ConfigError

LIMITS = ("max_epochs", "max_steps", "max_minutes")
DEFAULT_CHOICE = {"task": "language_model"}
LATER_GROUPS: dict[str, Any] = {"task": {}, "tracker": {}}  # which the first versions lacked
KEYS = known_keys()  # of the schema, without those of users
# Where the files of a run are: no two runs share all of them.
PLACES = (
    "run.root",
    "run.name",
    "data.cache_dir",
    "snapshot.path",
)
CODE_SHA256 = "code_sha256"  # a key of each group in older records: not a setting
OMITTED_IF_NULL = ("reader", "code")  # from config.yaml and snapshots


@dataclass(frozen=True)
class Config:
    """The configuration of a run, resolved, checked and immutable."""

    run: RunConfig
    task: TaskConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    data: Any  # DataConfig for text, DatasetConfig for samples
    ddp: DDPConfig
    trainer: TrainerConfig
    snapshot: SnapshotConfig
    tracker: TrackerConfig
    sweep: SweepConfig

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as YAML and JSON can hold them; without those of a sweep."""
        values = _as_json_values(dataclasses.asdict(self))
        del values["sweep"]  # of all jobs, which another schedule must not change
        return {group: _without_optional_nulls(keys) for group, keys in values.items()}

    def digest(self, extra: dict[str, Any] | None = None) -> str:
        """Return 8 hexadecimal digits of the SHA-256 of `named_values`.

        Args:
            extra: further JSON values to hash, under names that are not keys.
        """
        text = json.dumps({**named_values(self.to_dict()), **(extra or {})}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def named_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that enter a run's name, with their defaults; None for a required key.

    Args:
        values: a configuration as plain values; its model, optimizer and reader determine the keys.
    """
    defaults: dict[str, Any] = {}
    for group, (_, classes) in GROUPS.items():
        _, choice = selected(group, values.get(group, {}))
        cls = classes[choice or DEFAULT_CHOICE.get(group)]
        known = default_values(cls)
        for field in fields(cls):
            if enters_name(field):
                defaults[f"{group}.{field.name}"] = known.get(field.name)
    return defaults


def named_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that enter a run's name, as the input of its hash.

    Keys at their default are omitted, so that a key added later renames no run. Storage, limits,
    distribution, saving and logging do not count. The seed does: two seeds are two runs. The
    content of a user's file does not, so that a run resumes after a bug fix in the file.
    """
    flat = flatten(values)
    changed = {}
    for key, default in named_keys(values).items():
        if flat.get(key, default) != default:
            changed[key] = flat[key]
    return changed


def effect_of(key: str) -> Effect:
    """Return what a key of a recorded configuration, `group.key`, changes.

    The keys of users and of later versions change the training.
    """
    if key not in KEYS:
        return "training"
    effect: Effect = KEYS[key].metadata["json_schema_extra"]["changes"]
    return effect


def decides_bits(key: str, value: Any) -> bool:
    """Return whether a step may have other bits than without this recorded key.

    A key that does not enter a name counts only if it has not its default.
    """
    if effect_of(key) not in ("training", "rounding"):
        return False
    return key not in KEYS or enters_name(KEYS[key]) or value != KEYS[key].default


def as_read_then(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration that reads its text as the version that has recorded it.

    Those without `data.format` took anything in UTF-8 as text.
    """
    data = values["data"]
    if "dataset" in data or "format" in data:
        return values
    return {**values, "data": {**data, "format": "text"}}


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration as this version would have recorded it.

    Keys added since have their defaults, removed ones are gone. A user's class need not be
    registered: then the keys of its base are added.
    """
    filled = {}
    for group, keys in without_unknown({**values, **LATER_GROUPS, **values}).items():
        selector, _ = selected(group, keys)
        base = BASES["dataset" if selector == "dataset" else group] if selector else None
        cls = _class_of(group, keys) or base
        filled[group] = keys | (default_values(cls) if cls else {}) | keys
    return filled


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, `group.key`."""
    flat = {}
    for group, keys in values.items():
        for key, value in keys.items():
            flat[f"{group}.{key}"] = value
    return flat


def _as_json_values(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _without_optional_nulls(keys: dict[str, Any]) -> dict[str, Any]:
    omitted = {key for key in OMITTED_IF_NULL if keys.get(key) is None}
    return {key: value for key, value in keys.items() if key not in omitted}


def default_values(cls: type) -> dict[str, Any]:
    """Return a group's keys that have a default, with values as in a YAML file."""
    defaults = {}
    for field in fields(cls):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _as_json_values(field.default)
    return _without_optional_nulls(defaults)


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the plain values that Hydra has composed, with interpolations resolved.

    Raises:
        ConfigError: a value is missing or cannot be resolved.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from error
    return dict(values)


def explain_value(error: OmegaConfBaseException) -> str:
    """Return what is wrong with a value, as one line that begins with its key."""
    key = f"{error.full_key}: " if error.full_key else ""
    first = str(error).splitlines()[0]
    return key + re.sub(r"^\w+ (raised )?while resolving interpolation: ", "", first)


def from_mapping(values: dict[str, Any]) -> Config:
    """Return the typed configuration of plain values, as in a YAML file or a snapshot.

    Raises:
        ConfigError: a key or value is invalid; one line that names the key.
    """
    for key in values:
        if key not in GROUPS:
            raise ConfigError(f"{key} is not a key{suggest(str(key))}")
    values = {**LATER_GROUPS, "sweep": {}, **values}  # a recorded run has no sweep
    return Config(**{group: build_group(group, values.get(group)) for group in GROUPS})


def drop_defaults_of_others(group: str, values: Any, typed: set[str]) -> None:
    """Drop what a preset has at its default, and the task or optimizer of `name` lacks.

    A key that is typed is refused later.
    """
    classes = GROUPS[group][1]
    cls = classes.get(str(values.get("name"))) if isinstance(values, dict) else None
    if cls is None:
        return
    for key in {*values} - {*field_types(cls)}:
        is_default = any(values[key] == default_values(c).get(key, ...) for c in classes.values())
        if is_default and f"{group}.{key}" not in typed:
            del values[key]


def without_unknown(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration without the keys that this version does not know.

    A group with code of the user keeps all its keys: one that the code has lost must be refused.
    The group `data` does not, because a run compares the content of its data.
    """
    known = {}
    for group, keys in values.items():
        if group not in GROUPS:
            continue
        cls = _class_of(group, keys)
        has_code = group != "data" and keys.get("code") is not None
        known[group] = keys
        if cls is not None:
            names = field_types(cls)
            known[group] = {
                key: value
                for key, value in keys.items()
                if key in names or (has_code and key != CODE_SHA256)
            }
    return known


def _class_of(group: str, keys: dict[str, Any]) -> type | None:
    """Return the dataclass of a group's keys; None if nobody has registered the selected name."""
    _, choice = selected(group, keys)
    return GROUPS[group][1].get(DEFAULT_CHOICE.get(group) if choice is None else str(choice))


def build_group(group: str, values: Any) -> Any:
    """Return one group of the configuration, typed.

    Raises:
        NotRegisteredError: the selected name is not registered.
    """
    selectors, classes = GROUPS[group]
    may_be_empty = not selectors or group in DEFAULT_CHOICE
    is_there = isinstance(values, dict) and bool(values or may_be_empty)
    check(is_there, f"the group {group} is missing")
    selector, choice = selected(group, values)
    if choice is None:
        choice = DEFAULT_CHOICE.get(group)
    names = []
    for name, cls in classes.items():
        if issubclass(cls, DatasetConfig) == (selector == "dataset"):
            names.append(name)
    if not (choice is None or isinstance(choice, str)) or choice not in names:
        key = f"{group}.{selector}={str(choice)[:100]}"
        if names in ([], [None]):
            raise NotRegisteredError(f"{key} is registered by no Python file named as code")
        known = ", ".join("null" if name is None else name for name in names)
        raise NotRegisteredError(f"{key} must be one of {known}")
    known_keys = field_types(classes[choice])
    for key in values:
        if key not in known_keys:
            raise ConfigError(f"{group}.{key} is not a key{suggest(f'{group}.{key}', known_keys)}")
    return build(classes[choice], values, group)
