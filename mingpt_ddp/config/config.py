"""The whole configuration: Hydra's DictConfig in, frozen dataclasses out, and the run name derived from them."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mingpt_ddp.config import schema
from mingpt_ddp.config.schema import GROUPS
from mingpt_ddp.config.validation import build, check, did_you_mean
from mingpt_ddp.errors import ConfigError

LIMITS = ("max_epochs", "max_steps")
CODE_LOCATION_KEYS = ("code", "code_sha256")
OMITTED_IF_NULL = ("reader", *CODE_LOCATION_KEYS)  # from config.yaml and snapshots
DISPLAY_KEYS = ("log_every", "eval_every", "sample_every")
# Add a new key of trainer that changes no number of the run, or every unnamed run gets another name.
NON_HASHED_TRAINER_KEYS = (*LIMITS, *DISPLAY_KEYS, "prune", "prune_after", "activation_checkpointing")


@dataclass(frozen=True)
class Config:
    """The configuration of a run, resolved, checked and immutable."""

    run: schema.RunConfig
    model: schema.ModelConfig
    optimizer: schema.OptimizerConfig
    data: schema.DataConfig
    ddp: schema.DDPConfig
    trainer: schema.TrainerConfig
    snapshot: schema.SnapshotConfig

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as YAML and JSON can hold them."""
        plain = json.loads(json.dumps(dataclasses.asdict(self)))
        return {
            group: {key: value for key, value in values.items() if not (value is None and key in OMITTED_IF_NULL)}
            for group, values in plain.items()
        }

    def run_name(self, extra: dict[str, Any] | None = None) -> str:
        """Return `run.name`, or `<data>-<model>-<digest>`: the same on every rank, node and restart.

        Args:
            extra: see `digest`.
        """
        return self.run.name or f"{_slug(self.data.name)}-{_slug(self.model.name)}-{self.digest(extra)}"

    def digest(self, extra: dict[str, Any] | None = None) -> str:
        """Return 8 hexadecimal digits of the SHA-256 of the fields that determine the numerics.

        Args:
            extra: JSON values to hash with them, by keys that no group has.
        """
        text = json.dumps({**hashed_fields(self.to_dict()), **(extra or {})}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def hashed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration that determine the training, as the input of the run name's hash.

    Left out is where the run is stored, how long it lasts, how it is distributed or saved, what it displays and when it
    is pruned. The seed is included, so that two seeds are two runs. The SHA-256 of a user's file is not, so that a run
    resumes after a bug in the file has been fixed.
    """
    excluded = {"data": ("cache_dir",), "trainer": NON_HASHED_TRAINER_KEYS}
    hashed: dict[str, Any] = {"seed": values["run"]["seed"]}
    for group in ("model", "optimizer", "data", "trainer"):
        skip = (*excluded.get(group, ()), *CODE_LOCATION_KEYS)
        hashed[group] = {key: value for key, value in values[group].items() if key not in skip}
    return hashed


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", name)[:60]


def suggest(key: str) -> str:
    """Return a hint at what an unknown dotted key was meant to be: within its group if that is known, else anywhere."""
    known = {f"{group}.{f.name}" for group, (_, classes) in GROUPS.items() for c in classes.values() for f in fields(c)}
    if key in known:
        return f" of the chosen {key.split('.')[0]}"
    group, _, name = key.partition(".")
    if group in GROUPS:
        meant = did_you_mean(name, [other.split(".")[1] for other in known if other.startswith(f"{group}.")])
        return f"; did you mean {group}.{meant}?" if meant else f"; the keys of {group} are in conf/{group}"
    same_name = [other for other in sorted(known) if other.endswith(f".{key}")]
    meant = same_name[0] if same_name else did_you_mean(key, [*GROUPS, *known])
    return f"; did you mean {meant}?" if meant else ""


class NotRegisteredError(ConfigError):
    """The configuration selects a model, optimizer or reader that is not registered; `code` may be missing."""


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, `group.key`."""
    return {f"{group}.{key}": value for group, keys in values.items() for key, value in keys.items()}


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the plain values that Hydra has composed, with interpolations resolved.

    Raises:
        ConfigError: a value is missing or cannot be resolved.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(f"{error.full_key} is missing; give it a value") from error
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from error
    return dict(values)


def from_mapping(values: dict[str, Any]) -> Config:
    """Return the typed configuration of plain values, as Hydra, a snapshot or a YAML file holds them.

    Raises:
        ConfigError: anything that cannot work, as one line that names the key.
    """
    for key in values:
        if key not in GROUPS:
            raise ConfigError(f"{key} is not a key{suggest(str(key))}")
    return Config(**{group: build_group(group, values.get(group)) for group in GROUPS})


def build_group(group: str, values: Any) -> Any:
    """Return one group of the configuration, typed.

    Raises:
        NotRegisteredError: it selects a name that is not registered.
    """
    selector, classes = GROUPS[group]
    check(isinstance(values, dict), f"the group {group} is missing")
    choice = values.get(selector) if selector else None
    if not (choice is None or isinstance(choice, str)) or choice not in classes:
        known = ", ".join("null" if name is None else name for name in classes)
        raise NotRegisteredError(f"{group}.{selector}={str(choice)[:100]} must be one of {known}")
    return build(classes[choice], values, group)
