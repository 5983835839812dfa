"""The configuration of a run: checked and frozen dataclasses, made from Hydra's DictConfig."""

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

LIMITS = ("max_epochs", "max_steps", "max_minutes")  # keys of trainer that end a run
# The value of the key that selects the dataclass of a group (task.name), if the key is not set.
DEFAULT_CHOICE = {"task": "language_model"}
# Groups that did not exist in early versions of this package. A recorded configuration may lack
# them, and then gets these values.
GROUPS_ADDED_LATER: dict[str, Any] = {"task": {}, "tracker": {}}
KEYS = known_keys()  # the keys of the schema, without the keys that users register
# config.yaml and snapshots omit these keys if they are null.
OMITTED_IF_NULL = ("reader", "code")


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
        """Return the configuration as plain values for YAML and JSON, without the group `sweep`."""
        values = _as_json_values(dataclasses.asdict(self))
        # The configuration of a job must not depend on when and where the sweep runs the job.
        del values["sweep"]
        return {group: _without_optional_nulls(keys) for group, keys in values.items()}

    def digest(self, extra: dict[str, Any] | None = None) -> str:
        """Return 8 hexadecimal digits of the SHA-256 of `values_in_name`.

        Args:
            extra: Further JSON values to hash. Their names must not be configuration keys.
        """
        text = json.dumps({**values_in_name(self.to_dict()), **(extra or {})}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def keys_in_name(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that are part of a run's name, with their defaults (None if required).

    Args:
        values: A configuration as plain values. Its model, optimizer and reader determine the keys.
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


def values_in_name(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values whose hash is part of a run's name.

    Keys with their default values are omitted, so that a key that a later version adds does not
    rename a run. Keys about storage, limits, distribution, saving and logging are not part of the
    name. The seed is part of it, because two seeds are two runs. The content of a user's file is
    not part of it, so that a run can resume after a bug fix in the file.
    """
    flat = flatten(values)
    changed = {}
    for key, default in keys_in_name(values).items():
        if flat.get(key, default) != default:
            changed[key] = flat[key]
    return changed


def effect_of(key: str) -> Effect:
    """Return the effect of a recorded key (`group.key`) on results.

    A key of a user, or of a later version of the package, counts as one that changes the training.
    """
    if key not in KEYS:
        return "training"
    effect: Effect = KEYS[key].metadata["json_schema_extra"]["changes"]
    return effect


def may_change_results(key: str, value: Any) -> bool:
    """Return True if this recorded value may change the result of a training step.

    Even a change of the last bit of the result counts. A key that is not part of a run's name
    counts only if its value is not the default.
    """
    if effect_of(key) not in ("training", "rounding"):
        return False
    return key not in KEYS or enters_name(KEYS[key]) or value != KEYS[key].default


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
    """Return the defaults of a dataclass as in a YAML file, without its required keys."""
    defaults = {}
    for field in fields(cls):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = _as_json_values(field.default)
    return _without_optional_nulls(defaults)


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Convert a composed configuration of Hydra to plain values. Resolve its interpolations.

    Raises:
        ConfigError: A value is missing or cannot be resolved.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from error
    return dict(values)


def explain_value(error: OmegaConfBaseException) -> str:
    """Describe an error of OmegaConf in one line that begins with the key."""
    key = f"{error.full_key}: " if error.full_key else ""
    first = str(error).splitlines()[0]
    return key + re.sub(r"^\w+ (raised )?while resolving interpolation: ", "", first)


def from_mapping(values: dict[str, Any]) -> Config:
    """Build and check the configuration from plain values, as in a YAML file or a snapshot.

    Raises:
        ConfigError: A key or value is invalid. The message is one line that names the key.
    """
    for key in values:
        if key not in GROUPS:
            raise ConfigError(f"{key} is not a key{suggest(str(key))}")
    values = {**GROUPS_ADDED_LATER, "sweep": {}, **values}  # a recorded run has no sweep
    return Config(**{group: build_group(group, values.get(group)) for group in GROUPS})


def drop_leftover_defaults(group: str, values: Any, command_line_keys: set[str]) -> None:
    """Drop the keys of a group that the chosen task or optimizer does not have.

    Such keys are left over from the preset of a different task or optimizer. A key is dropped only
    if it has the default value and is not on the command line. `build_group` refuses all other
    unknown keys.

    Args:
        group: "task" or "optimizer".
        values: Values of the group. Changed in place.
        command_line_keys: Keys from the command line.
    """
    classes = GROUPS[group][1]
    cls = classes.get(str(values.get("name"))) if isinstance(values, dict) else None
    if cls is None:
        return
    for key in {*values} - {*field_types(cls)}:
        is_default = any(values[key] == default_values(c).get(key, ...) for c in classes.values())
        if is_default and f"{group}.{key}" not in command_line_keys:
            del values[key]


def build_group(group: str, values: Any) -> Any:
    """Build and check the dataclass of one group from plain values.

    Raises:
        NotRegisteredError: The selected name is not registered.
        ConfigError: The group is missing, or a key or value is invalid.
    """
    selectors, classes = GROUPS[group]
    may_be_empty = not selectors or group in DEFAULT_CHOICE
    is_there = isinstance(values, dict) and bool(values or may_be_empty)
    check(is_there, f"the group {group} is missing; add it to the configuration")
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
            raise NotRegisteredError(
                f"{key} is not registered: the configuration does not name the Python file that "
                f"registers it ({group}.code)"
            )
        known = ", ".join("null" if name is None else name for name in names)
        raise NotRegisteredError(f"{key} must be one of {known}")
    known_keys = field_types(classes[choice])
    for key in values:
        if key not in known_keys:
            raise ConfigError(f"{group}.{key} is not a key{suggest(f'{group}.{key}', known_keys)}")
    return build(classes[choice], values, group)
