"""The whole configuration: Hydra's DictConfig in, frozen dataclasses out, and the name that follows from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mingpt_ddp.config.schema import (
    GROUPS,
    DataConfig,
    DDPConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SnapshotConfig,
    TrainerConfig,
)
from mingpt_ddp.config.validation import build, did_you_mean
from mingpt_ddp.errors import ConfigError

LIMITS = ("max_epochs", "max_steps")
# Keys that stand in a record only where they have a value, and those of them that say where, not what.
OPTIONAL, WHERE = ("reader", "code", "code_sha256"), ("code", "code_sha256")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run, resolved and checked; it is never changed afterwards."""

    run: RunConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    ddp: DDPConfig
    trainer: TrainerConfig
    snapshot: SnapshotConfig

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON can hold them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        for values in plain.values():
            for key in OPTIONAL:
                if values.get(key, "") is None:
                    del values[key]
        return plain

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


# Keys of trainer that change no number of the run.
BESIDE = ("log_every", "eval_every", "sample_every", "prune", "prune_after", "activation_checkpointing")


def hashed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Of the plain values of a configuration those that make the training.

    Not where the run lives, how long it lasts, how it is distributed or saved, what it displays or when it is pruned.
    The seed is among them, so that two seeds are two runs; a user's code is not, so that a run goes on when a mistake
    in it has been mended.
    """
    beside = {"data": ("cache_dir",), "trainer": (*LIMITS, *BESIDE)}
    groups = ("model", "optimizer", "data", "trainer")
    made = {g: {k: v for k, v in values[g].items() if k not in (*beside.get(g, ()), *WHERE)} for g in groups}
    return {**made, "seed": values["run"]["seed"]}


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", name)[:60]


def suggest(key: str) -> str:
    """A hint at what an unknown dotted key was meant to be: within its group where that is known, else anywhere."""
    known = {f"{group}.{f.name}" for group, (_, classes) in GROUPS.items() for c in classes.values() for f in fields(c)}
    if key in known:
        return f" of the chosen {key.split('.')[0]}"
    group, _, name = key.partition(".")
    if group in GROUPS:
        meant = did_you_mean(name, [other.split(".")[1] for other in known if other.startswith(f"{group}.")])
        return f"; did you mean {group}.{meant}?" if meant else f"; the group {group} is described in conf/{group}"
    same_name = [other for other in sorted(known) if other.endswith(f".{key}")]
    meant = same_name[0] if same_name else did_you_mean(key, [*GROUPS, *known])
    return f"; did you mean {meant}?" if meant else ""


class UnknownCode(ConfigError):
    """A model, an optimizer or a reader that is none of ours; its file may not have been named."""


def from_dictconfig(cfg: DictConfig) -> Config:
    """The typed configuration of what Hydra composed.

    Raises:
        ConfigError: anything that cannot work, as one line that names the key.
    """
    return from_mapping(to_plain(cfg))


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Plain values of what Hydra composed. Raises as `from_dictconfig` does."""
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(f"{error.full_key} is missing; give it a value") from error
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from error
    return dict(values)


def from_mapping(values: dict[str, Any]) -> Config:
    """The typed configuration of plain values, as a snapshot or a YAML file holds them."""
    for key in values:
        if key not in GROUPS:
            raise ConfigError(f"{key} is not a key{suggest(str(key))}")
    return Config(**{group: build_group(group, values.get(group)) for group in GROUPS})


def build_group(group: str, values: Any) -> Any:
    """One group of the configuration.

    Raises:
        UnknownCode: it selects what nobody has registered.
    """
    selector, classes = GROUPS[group]
    if not isinstance(values, dict):
        raise ConfigError(f"the group {group} is missing")
    choice = values.get(selector) if selector else None
    if not (choice is None or isinstance(choice, str)) or choice not in classes:
        known = ", ".join("null" if name is None else name for name in classes)
        raise UnknownCode(f"{group}.{selector}={str(choice)[:100]} must be one of {known}")
    return build(classes[choice], values, group)
