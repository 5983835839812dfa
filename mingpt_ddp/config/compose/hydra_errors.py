"""Explain Hydra's errors in one line."""

import re
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.config import explain_value
from mingpt_ddp.config.hints import suggest

# The plugins of Hydra that our presets use, and the extras in setup.cfg that install them.
PLUGINS = {
    "hydra/launcher/submitit_slurm": "slurm",
    "hydra/launcher/submitit_local": "slurm",
    "hydra/launcher/ray": "ray",
}
HOW_TO_SWEEP = "-m, or mingpt_ddp.sweep"


def explain(error: Exception) -> str:
    """Explain an error of Hydra in one line, without the passwords of URLs.

    This package words the errors about an unknown preset or key, a group with an unnecessary +, and
    an override with several values. All other errors keep Hydra's words.
    """
    text = str(error)
    preset = re.search(r"Could not (?:find|load) '(.+)/([^/']+)'", text)
    if preset and (line := _explain_unknown_preset(preset[1], preset[2], text)):
        return line
    if override := re.search(r"Could not override '([^'@]+)", text):
        return _explain_unknown_key(override[1], error)
    if added := re.search(r"Multiple values for (\S+)\. .*'override [^:]+: (\S+)'", text):
        group, name = added.groups()
        return f"{group} is already in the defaults list; write {group}={name}, without the +"
    if swept := re.search(r"Sweep parameters '(.+)' requires --multirun", text):
        return (
            f"{swept[1]} has several values; a sweep trains a job with each value ({HOW_TO_SWEEP})"
        )
    if several := re.search(r"Ambiguous value for argument '(([^=]+)=(.*))'\n", text):
        word, key, values = several.groups()
        return (
            f"{word} has several values; a sweep trains a job with each value ({HOW_TO_SWEEP}); "
            f"write '{key}=[{values}]' for a list, or '{key}=\"{values}\"' for a text"
        )
    if isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}: {text}"
    elif isinstance(error, OmegaConfBaseException):
        text = explain_value(error)
    elif not isinstance(error, HydraException):
        kind = type(error).__name__
        text = f"cannot read the command line or a configuration file ({kind}: {text})"
    text = re.sub(r"Config search path:.*|See https://hydra.cc.*", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"//[^/\s]*@", "//...", text).split())[:400]


def _explain_unknown_preset(group: str, name: str, text: str) -> str | None:
    """Say that a preset does not exist, and list the presets of its group.

    Return None if the group has no presets.

    Args:
        text: Text of Hydra's error, which contains this list.
    """
    preset = f"{group}/{name}"
    if preset in PLUGINS:
        return f"{preset} is not installed; run pip install 'mingpt_ddp[{PLUGINS[preset]}]'"
    options = text.partition("Config search path")[0]
    known = ", ".join(re.findall(r"^\t(\S+)$", options, re.MULTILINE))
    if not known:
        return None
    return (
        f"Could not find '{preset}'; choose one of {known}, or add --config-dir=DIR for your own "
        "preset"
    )


def _explain_unknown_key(key: str, error: Exception) -> str:
    """Say that a key is unknown, and suggest the key that was probably meant."""
    cause: Any = error.__cause__  # an error that has the keys of the group, also the user's keys
    in_group = (
        "." in key
        and getattr(cause, "full_key", None) == key
        and isinstance(cause.parent_node, DictConfig)
    )
    chosen = map(str, cause.parent_node) if in_group else None
    return f"{key} is not a key{suggest(key, chosen)}"
