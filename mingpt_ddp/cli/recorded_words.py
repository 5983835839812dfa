"""The words that train with the configuration that a run has recorded, and with changes."""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir

from mingpt_ddp.cli.arguments import parse_value
from mingpt_ddp.config.compose.hydra_utils import (
    VERSION_BASE,
    config_directory,
    config_flags,
    hydra_value,
    key_of,
    key_of_group,
)
from mingpt_ddp.config.config import (
    DEFAULT_CHOICE,
    LIMITS,
    PLACES,
    as_read_then,
    default_values,
    flatten,
    named_keys,
    to_plain,
    with_defaults,
)
from mingpt_ddp.config.keys.schema import GROUPS, selected
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import LONGEST_LINE, ConfigError
from mingpt_ddp.storage.run_directory import recorded_config
from mingpt_ddp.storage.yaml_and_json import read_yaml
from mingpt_ddp.terminal import echo_error

# A stranger who wrote the run could use these keys to be sent files.
LEFT_OUT = (*PLACES, "run.resume", "tracker.entity", "tracker.uri")
NAMES = ("run.root", "run.name")  # from the directory itself


def command_words(run: str, typed: list[str]) -> list[str]:
    """Return the words after `python -m mingpt_ddp`, and log what is left out.

    Args:
        run: a run directory, untrusted.
        typed: the words after it on the command line.

    Raises:
        ConfigError: there is no recorded configuration, or it needs a word that is not typed.
    """
    directory = Path(os.path.realpath(run))  # Path.resolve() raises in a loop of links
    recorded = recorded_config(directory) if "://" not in run else None
    if recorded is None or not {*recorded} >= {"run", "model", "optimizer", "data", "trainer"}:
        raise ConfigError(f"{run} has no config.yaml of a run; name a run directory")
    recorded = with_defaults(as_read_then(recorded))
    for group in recorded.values():
        for key in group:
            is_name = str(key).isidentifier()
            check(is_name, f"{run}/config.yaml has the key {str(key)[:50]!r}, which no run writes")
    keys = {key_of(word): word.partition("=")[2] for word in typed if not word.startswith("-")}
    typed_limits = [name for name in LIMITS if f"trainer.{name}" in keys]
    if typed_limits:  # they are the only limits
        recorded["trainer"] |= dict.fromkeys(LIMITS)
    if "trainer.batch_size_per_rank" in keys:
        recorded["trainer"].pop("batch_size", None)
    words = list[str]()
    omitted = list[str]()
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        unchanged = to_plain(compose("config"))
    for group in GROUPS:
        for key, word in _group_words(group, recorded.get(group, {}), unchanged, group in keys):
            value = recorded.get(group, {}).get(key.partition(".")[2])
            if key in keys or key in NAMES:
                continue
            if is_left_out(key, value):
                omitted.append(f"{key}={value}")
            else:
                words.append(word)
    own = [word for word in omitted if _is_own_code(word, keys)]
    if own:
        needed = shlex.join([*_config_flags(directory), *own])
        listed = ", ".join(omitted)
        raise ConfigError(f"not taken from {run}: {listed}; type what you trust, with {needed}")
    if omitted:
        message = f"not taken from {run}: {', '.join(omitted)}; type what you trust"
        echo_error(message[:LONGEST_LINE])
    return [*words, *_directory_words(directory, recorded, keys), *typed]


def is_left_out(key: str, value: Any) -> bool:
    """Return whether a recorded value could run a program or send files, unless it is typed."""
    if key in LEFT_OUT or key.endswith(".code"):
        return True
    is_url = "://" in str(value) and not key.startswith("data.")
    return is_url or "::" in str(value)


def _is_own_code(word: str, typed: dict[str, str]) -> bool:
    """Return whether a word names a user's file, and no preset is typed that may name it."""
    group, _, key = word.partition("=")[0].partition(".")
    return key == "code" and not {group, "experiment"} & typed.keys()


def _config_flags(directory: Path) -> list[str]:
    """Return the options that named the presets of a run, where a user's files are."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return config_flags(read_yaml(directory / ".hydra" / "hydra.yaml")["hydra"])
    return ["--config-dir=DIR"]


def _group_words(
    group: str, keys: dict[str, Any], unchanged: dict[str, Any], is_typed: bool
) -> Iterator[tuple[str, str]]:
    """Yield the overrides of a group with their keys: the closest preset, and what differs.

    Args:
        unchanged: all groups as they are without overrides.
        is_typed: a preset of the group is on the command line: it replaces one of ours, and
            provides code of yours.
    """
    selectors, classes = GROUPS[group]
    selector, choice = selected(group, keys)
    if choice is None:
        choice = DEFAULT_CHOICE.get(group)
    known = (choice is None or isinstance(choice, str)) and choice in classes
    values: dict[str, Any] = {}
    if known and selectors and is_typed:
        return
    advice = f"type its preset, as in --config-dir=DIR {group}=NAME"
    check(known or is_typed, f"{group}.{selector}={choice} is in code of yours; {advice}")
    if known and selectors:
        name, values = _closest_preset(group, keys, choice, default_values(classes[choice]))
        yield group, f"{group}={name}"
    elif known:
        values = unchanged[group]
    for key, value in keys.items():
        if values.get(key, ...) != value:
            added = "" if key in values else "++"
            yield f"{group}.{key}", f"{added}{group}.{key}={hydra_value(value)}"


def _closest_preset(
    group: str, keys: dict[str, Any], choice: str | None, defaults: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the preset in conf/ with the fewest other values, and its values.

    Args:
        choice: what selects the keys of the group, as in architecture=gpt.
        defaults: of these keys.
    """
    presets = []
    for path in sorted((config_directory() / group).glob("*.yaml")):
        values = {**defaults, **yaml.safe_load(path.read_text())}
        if f"/schema/{group}/{choice or 'text'}@_here_" not in values.pop("defaults", ()):
            continue
        differing = sum(values.get(key, ...) != value for key, value in keys.items())
        if choice:
            selector = GROUPS[group][0][0]
            values[selector] = choice
        presets.append((differing, path.stem, values))
    check(presets, f"no preset of {group} is like that of the run")
    _, name, values = min(presets, key=lambda each: each[:2])
    return name, values


def _directory_words(
    directory: Path, recorded: dict[str, Any], typed: dict[str, str]
) -> Iterable[str]:
    """Return run.root, and run.name if the run itself goes on, unless they are typed."""
    depth = str(recorded["run"].get("name") or "").count("/") + 1  # sweep/job has 2 parts
    names = {"root": str(directory.parents[depth - 1]), "name": "/".join(directory.parts[-depth:])}
    if _is_another_run(recorded, typed):
        del names["name"]
    words = []
    for key, value in names.items():
        if f"run.{key}" not in typed:
            words.append(f"run.{key}={hydra_value(value)}")
    return words


def _is_another_run(recorded: dict[str, Any], typed: dict[str, str]) -> bool:
    """Return whether the command line gives the run another name."""
    if {*GROUPS, "experiment"} & typed.keys():  # a preset
        return True
    flat = flatten(recorded)
    named = named_keys(recorded)
    for key, value in typed.items():
        if key_of_group(key) in named and parse_value(value) != flat.get(key):
            return True
    return False
