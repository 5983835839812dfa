"""The configuration of another Hydra application, as words of the train command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_internals import full_key
from mingpt_ddp.config.compose.hydra_utils import hydra_value, typed_keys
from mingpt_ddp.config.config import LATER_GROUPS, flatten, to_plain
from mingpt_ddp.config.hints import suggest
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.errors import ConfigError

PRESET = "application"  # of the group experiment
OPTIONAL = {*LATER_GROUPS, "sweep"}  # which a recorded configuration may lack


def application_words(cfg: DictConfig, directory: Path) -> list[str]:
    """Write a composed configuration as a preset, and return the words that train with it.

    The keys that the application's command line sets are among them: of two limits, one that is
    typed counts alone.

    Args:
        cfg: all of the application's configuration, whose other keys are its own, or the node that
            holds the groups and nothing else.
        directory: gets the preset; the training reads it until it ends.

    Raises:
        ConfigError: a group is missing, the node has another key, or a value cannot be resolved.
    """
    node = full_key(cfg)
    for key in map(str, cfg if node else ()):
        if key not in GROUPS:
            raise ConfigError(f"{node}.{key} is not a key{suggest(key)}")
    values = _groups(cfg)
    if missing := [group for group in GROUPS if group not in {*values, *OPTIONAL}]:
        raise ConfigError(
            f"{node or 'the configuration'} has no group {', '.join(missing)}; compose mingpt_ddp, "
            "and give train the node that holds its groups (docs/python.md)"
        )
    # presets of the groups whose keys depend on a choice would add keys of another one
    chosen = [group for group, (selectors, _) in GROUPS.items() if selectors and group in values]
    defaults = [{f"override /{group}": None} for group in chosen]
    text = json.dumps({"defaults": defaults, **values}, ensure_ascii=False, default=str)
    text = text.replace("${", r"\\${")  # values are resolved
    preset = directory / "experiment" / f"{PRESET}.yaml"
    preset.parent.mkdir()
    preset.write_text(f"# @package _global_\n{text}\n")
    words = [f"--config-dir={directory}", f"experiment={PRESET}"]
    if HydraConfig.initialized():  # by @hydra.main, not by compose()
        words += _typed_words(node, flatten(values))
        words += _search_path(values)
    return words


def _groups(cfg: DictConfig) -> dict[str, Any]:
    """Return the groups of a configuration as plain values."""
    groups = {}
    for group in GROUPS:
        if group in cfg and isinstance(cfg[group], DictConfig):
            groups[group] = to_plain(cfg[group])
    return groups


def _typed_words(node: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the overrides of the application's command line of keys in a node, by their values."""
    for typed in sorted(typed_keys()):
        key = typed.removeprefix(f"{node}.")
        if key in values and typed == ".".join(filter(None, [node, key])):
            yield f"{key}={hydra_value(values[key])}"


def _search_path(values: dict[str, Any]) -> list[str]:
    """Return the word for the application's directories, if a preset names a Python file there."""
    if not any("code" in keys for keys in values.values()):
        return []
    sources = HydraConfig.get().runtime.config_sources
    directories = [source.path for source in sources if source.schema == "file"]
    return [f"hydra.searchpath={hydra_value(directories)}"]
