"""Refuse settings on the command line of a user's script that the script does not read."""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.config.loaded_code import names_in, script_path
from mingpt_ddp.errors import ConfigError

# Keys that have an effect only in the loop of main.py, unless a script reads them itself, as in
# `config.trainer.patience`.
KEYS_OF_MAIN_LOOP = (
    "run.init_from",
    "run.init_sha256",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.sample_every",
    "trainer.profile",
    "trainer.on_nonfinite",
    "trainer.spike_factor",
    "trainer.patience",
    "trainer.min_delta",
    "snapshot.every_steps",
    "snapshot.every_epochs",
    "snapshot.every_minutes",
    "snapshot.mtbf_hours",
    "snapshot.grace_seconds",
    "ddp.launcher",
    "ddp.max_restarts",
    "ddp.preempted_exit_code",
)

# The script of this process, once it has called `resolve`. A callback reads it here, because Hydra
# passes none of our values to callbacks.
_resolving: list[Path] = []


def begin_to_resolve() -> Path:
    """Record that the script of this process has called `resolve`. Return the script's path."""
    _resolving.append(script_path() or Path(sys.argv[0]))
    return _resolving[-1]


def resolving_script() -> Path | None:
    """Return the script of this process if it has called `resolve`, else None."""
    return _resolving[-1] if _resolving else None


def refuse_unread_keys(keys: Iterable[str], script: Path) -> None:
    """Refuse keys from the command line that only the loop of main.py reads.

    A key counts as read if its last part, such as patience, occurs in the code of the script or of
    a file that the script imports.

    Args:
        keys: All keys from the command line.

    Raises:
        ConfigError: The message names the first such key.
    """
    names = names_in([script])
    for key in sorted({*keys} & {*KEYS_OF_MAIN_LOOP}):
        name = key.rpartition(".")[2]
        if name not in names:
            raise ConfigError(
                f"{key} is a key for the training loop of main.py, and {script.name} does not read "
                f"it; leave it out, or read config.{key} in the script"
            )


def refuse_unread_words(config: Config) -> None:
    """Refuse settings on the command line of a script that does not call `resolve`.

    Such a script ignores these settings. Its command line may also have words that only the script
    understands. A word is refused only if it selects a preset, as in model=NAME, or if it sets a
    key to a value that differs from the configuration.

    Raises:
        ConfigError: The message names the first such word.
    """
    if _resolving:
        return
    values = flatten(config.to_dict())
    for word in sys.argv[1:]:
        key, equals, text = word.partition("=")
        if equals and (key in GROUPS or (key in values and not _is_value(text, values[key]))):
            raise ConfigError(
                f"{word} has no effect, because {Path(sys.argv[0]).name} does not read its command "
                "line; change the value in the script, or take the configuration from "
                "resolve().config"
            )


def _is_value(text: str, value: Any) -> bool:
    """Return True if a text from the command line stands for this value."""
    with suppress(ValueError, TypeError):
        return float(text) == float(value)
    return text in (str(value), json.dumps(value, default=str))
