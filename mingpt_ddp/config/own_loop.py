"""A script with a training loop of its own, and what that loop does not read."""

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

# Keys that only the loop of main.py reads. A script may read them too, as config.trainer.patience.
KEYS_OF_MAIN = (
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

# The script of this process, once it has called `resolve`. Hydra cannot pass it on to a callback.
_resolving: list[Path] = []


def begin_to_resolve() -> Path:
    """Record that the script of this process reads its command line. Return its path."""
    _resolving.append(script_path() or Path(sys.argv[0]))
    return _resolving[-1]


def resolving_script() -> Path | None:
    """Return the script of this process if it has called `resolve`, else None."""
    return _resolving[-1] if _resolving else None


def refuse_unread_keys(keys: Iterable[str], script: Path) -> None:
    """Refuse keys from the command line that only the loop of main.py reads.

    A key counts as read if the code of the script, or of a file that it imports, has its name.

    Raises:
        ConfigError: It names the first such key.
    """
    names = names_in([script])
    for key in sorted({*keys} & {*KEYS_OF_MAIN}):
        name = key.rpartition(".")[2]
        if name not in names:
            raise ConfigError(
                f"{key} is for the loop of main.py, and {script.name} does not read it; leave it "
                f"out, or read config.{key} in the script"
            )


def refuse_unread_words(config: Config) -> None:
    """Refuse words of the command line that a script without `resolve` has ignored.

    The words of a script are its own business, but not those that name a key of the configuration
    which has another value.

    Raises:
        ConfigError: It names the first such word.
    """
    if _resolving:
        return
    values = flatten(config.to_dict())
    for word in sys.argv[1:]:
        key, equals, text = word.partition("=")
        if equals and (key in GROUPS or (key in values and not _is_value(text, values[key]))):
            raise ConfigError(
                f"{word} has no effect, because {Path(sys.argv[0]).name} does not read its command "
                "line; change the value in the script, or read the words by resolve().config"
            )


def _is_value(text: str, value: Any) -> bool:
    with suppress(ValueError, TypeError):
        return float(text) == float(value)
    return text in (str(value), json.dumps(value, default=str))
