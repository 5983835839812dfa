"""Register the recorded configuration of a run as Hydra presets, for the command `again`."""

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mingpt_ddp.config.compose.hydra_utils import (
    hydra_value,
    key_of,
    key_of_group,
    literal,
)
from mingpt_ddp.config.config import KEYS, flatten
from mingpt_ddp.config.keys.fields import enters_name
from mingpt_ddp.config.keys.schema import GROUPS, selected
from mingpt_ddp.config.recorded import (
    class_of,
    is_untrusted,
    untrusted_values,
    with_data_format,
    with_defaults,
)
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import LONGEST_LINE, ConfigError
from mingpt_ddp.process.terminal import echo_error
from mingpt_ddp.storage.recorded_words import confirming_words
from mingpt_ddp.storage.run_directory import recorded_config, refuse_other_loop

PRESET = "recorded"


def store_recorded(run: str, command_line: list[str]) -> list[str]:
    """Register the recorded configuration of a run with Hydra, and log the values left out of it.

    Args:
        run: A run directory. Its content is not trusted.
        command_line: The words after the run directory. They change the configuration.

    Returns:
        Words of a train command. The first words select the recorded configuration, and the words
        of `command_line` follow.

    Raises:
        ConfigError: There is no recorded configuration, or the run needs a word that the command
            line does not have.
    """
    directory = Path(os.path.realpath(run))  # Path.resolve() raises in a loop of links
    recorded = recorded_config(directory) if "://" not in run else None
    if recorded is None or not {*recorded} >= {"run", "model", "optimizer", "data", "trainer"}:
        raise ConfigError(f"{run} has no config.yaml of a run; name a run directory")
    refuse_other_loop(directory)
    recorded = with_defaults(with_data_format(recorded))
    for key in flatten(recorded):
        is_name = key.partition(".")[2].isidentifier()
        check(is_name, f"{run}/config.yaml has the key {key[:50]!r}, which is not a valid key")
    overrides = [word for word in command_line if not word.startswith("-")]
    command_line_values = {key_of(word): word.partition("=")[2] for word in overrides}
    words = []
    for group in GROUPS:
        if group not in recorded:
            continue
        if group not in command_line_values:
            if GROUPS[group][0]:
                # Select an empty preset. The default preset may have keys of another model.
                ConfigStore.instance().store(group=group, name=PRESET, node={})
                words.append(f"{group}={PRESET}")
        elif group != "run" and class_of(group, recorded[group]) is not None:
            del recorded[group]  # the preset on the command line replaces it
    directory_words = _directory_words(directory, recorded, command_line_values)
    _leave_out(recorded, command_line_values, run, directory)
    for group, keys in recorded.items():
        has_code = {group, "experiment", f"{group}.code"} & command_line_values.keys()
        if not has_code and class_of(group, keys) is None:  # no file has registered the choice
            selector, choice = selected(group, keys)
            advice = f"add the preset that names your file, as in --config-dir=DIR {group}=NAME"
            raise ConfigError(f"{group}.{selector}={choice} needs your own code; {advice}")
    if "experiment" in command_line_values:
        echo_error(
            f"experiment={command_line_values['experiment']} adds only keys that {run} has not "
            "recorded, such as code"
        )
    # Hydra reads this preset last, so that recorded values replace the values of an experiment.
    node = _node(recorded)
    ConfigStore.instance().store(group=PRESET, name=PRESET, package="_global_", node=node)
    return [*words, f"+{PRESET}={PRESET}", *directory_words, *command_line]


def _directory_words(
    directory: Path, recorded: dict[str, Any], command_line: dict[str, str]
) -> list[str]:
    """Return words for run.root and, if the recorded run itself continues, for run.name.

    Leave out the keys that the command line sets.
    """
    depth = str(recorded["run"].get("name") or "").count("/") + 1  # a name may be sweep/job
    root = directory.parents[depth - 1]
    as_recorded = str(recorded["run"].get("root"))
    if os.path.realpath(as_recorded) == str(root):
        root = Path(as_recorded)  # keep the recorded path of the same directory
    names = {"root": str(root), "name": "/".join(directory.parts[-depth:])}
    if _is_another_run(recorded, command_line):
        del names["name"]
    words = []
    for key, value in names.items():
        if f"run.{key}" not in command_line:
            words.append(f"run.{key}={hydra_value(value)}")
    return words


def _is_another_run(recorded: dict[str, Any], command_line: dict[str, str]) -> bool:
    """Return True if the command line changes a key that is part of a run's name."""
    named = {key.partition(".")[0] for key, field in KEYS.items() if enters_name(field)}
    if {*named, "experiment"} & command_line.keys():  # the command line selects a preset
        return True
    flat = flatten(recorded)
    for key, value in command_line.items():
        schema_key = key_of_group(key)
        # A key that is in a group of the schema, but not in the schema, is a user's own key. It is
        # part of the name.
        is_in_name = schema_key.partition(".")[0] in GROUPS and (
            schema_key not in KEYS or enters_name(KEYS[schema_key])
        )
        if is_in_name and _value_of(value) != flat.get(key):
            return True
    return False


def _value_of(text: str) -> Any:
    """Parse the value of an override as Hydra does. Return the text if Hydra cannot parse it."""
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(f"key={text}").value()
    return text


def _leave_out(
    recorded: dict[str, Any], command_line: dict[str, str], run: str, directory: Path
) -> None:
    """Delete recorded values that could run a program or send files.

    Log the deleted values, except those that the command line replaces.

    Raises:
        ConfigError: A Python file of the user is needed, and the command line does not name it.
    """
    flat = flatten(recorded)
    for key, value in flat.items():
        if is_untrusted(key, value):
            group, _, name = key.partition(".")
            del recorded[group][name]
    omitted = {
        key: value for key, value in untrusted_values(flat).items() if key not in command_line
    }
    if not omitted:
        return
    listed = ", ".join(f"{key}={value}" for key, value in omitted.items())
    notice = (
        f"these recorded values of {run} are not used: {listed}; if you trust them, add them to "
        "the command line"
    )
    for key in omitted:
        # A preset on the command line may name the file.
        if (
            key.endswith(".code")
            and not {key.partition(".")[0], "experiment"} & command_line.keys()
        ):
            needed = shlex.join(confirming_words(directory, flat))
            raise ConfigError(f"{notice}: {needed}")
    echo_error(notice[:LONGEST_LINE])


def _node(value: Any) -> Any:
    """Convert a value for OmegaConf so that it reads no text as an interpolation."""
    if isinstance(value, dict):
        return {str(key): _node(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_node(each) for each in value]
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain else literal(str(value))  # str() for a date in an edited file
