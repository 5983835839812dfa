"""Hydra's errors as one line."""

import re
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from mingpt_ddp.config.config import explain_value
from mingpt_ddp.config.hints import suggest
from mingpt_ddp.config.retired import retired

# Hydra's plugins that presets use, and the extras in setup.cfg that install them.
PLUGINS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray"}


def explain(error: Exception) -> str:
    """Return Hydra's error as one line: with the key that was meant, without passwords of URLs."""
    text = str(error)
    plugin = re.search(r"Could not find '(hydra/(?:sweeper|launcher)/(\w+))'", text)
    if plugin and plugin[2] in PLUGINS:
        return f"{plugin[1]} is not installed; pip install 'mingpt_ddp[{PLUGINS[plugin[2]]}]'"
    preset = re.search(r"Could not (?:find|load) '([^']+)/(\w+)'", text)
    if preset and (line := retired("=".join(preset.groups()))):
        return line
    if missing := re.search(r"Could not find '[^']+'(?=\s+Available options)", text):
        options = text.partition("Config search path")[0]
        known = ", ".join(re.findall(r"^\t(\S+)$", options, re.MULTILINE))
        return (
            f"{missing[0]}; choose one of {known}, or add --config-dir=DIR for a preset of your own"
        )
    if override := re.search(r"Could not override '([^']+)'", text):
        return _explain_unknown_key(override[1].split("@")[0], error)
    if added := re.search(r"Multiple values for (\S+)\. .*'override [^:]+: (\S+)'", text):
        group, name = added.groups()
        return (
            f"{group} is already in the defaults list; write {group}={name}, without the + "
            f"(in a YAML file: override /{group}: {name})"
        )
    several = r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?: requires|\n)"
    if found := re.search(several, text):
        return f"{found[1]} has several values: add -m for a sweep, or write key=[a,b] for a list"
    if "Config group override must be a string" in text:
        return "null is not a preset; leave the group out, or put an empty YAML file in its place"
    if isinstance(error, RecursionError):
        return (
            "a value on the command line or in a configuration file is nested too deeply; unfold it"
        )
    if isinstance(error, OverrideParseException):
        quoted = "quote special characters twice as in 'key=\"a=b\"'"
        text = f"cannot read {error.override!r}, {quoted}: {text}"
    elif isinstance(error, InterpolationResolutionError):
        text = explain_value(error)
    elif not isinstance(error, (HydraException, OmegaConfBaseException)):
        kind = type(error).__name__
        text = f"cannot read the command line or a configuration file ({kind}: {text})"
    noise = r"^In '[^']*': |Config search path:.*|See https://hydra.cc.*"
    text = re.sub(noise, "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"//[^/\s]*@", "//...", text).split())[:400]


def _explain_unknown_key(key: str, error: Exception) -> str:
    """Name an unknown key, and the one that was meant."""
    if line := retired(key):
        return line
    cause: Any = error.__cause__  # has the keys of the group, which a user may have registered
    in_group = (
        "." in key
        and getattr(cause, "full_key", None) == key
        and isinstance(cause.parent_node, DictConfig)
    )
    chosen = map(str, cause.parent_node) if in_group else None
    return f"{key} is not a key{suggest(key, chosen)}"
