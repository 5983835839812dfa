"""What the small commands share: `key=value` words into a typed config, help, errors in one line."""

import sys
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from mingpt_ddp.config.validation import build, check
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import cli_errors
from mingpt_ddp.errors import printable

T = TypeVar("T")
CONSTANTS = {"null": None, "None": None, "true": True, "false": False}


def run_command(usage: str, command: Callable[[list[str]], int]) -> None:
    """Call a command with the words of the command line and exit with its code; without words print the usage."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(usage)
        return
    if sys.stdout:  # None where it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    logs.to_console(DistEnv())
    with cli_errors():
        sys.exit(command(words))


def parse_arguments(config_class: type[T], words: list[str]) -> T:
    """Build a config from `key=value` words; the text of a field of type str is taken literally.

    Raises:
        ConfigError: a word has another form, or a key or a value does not fit.
    """
    hints = typing.get_type_hints(config_class)
    values = {}
    for word in words:
        key, equals, text = word.partition("=")
        check(bool(equals), f"{word} is not of the form key=value")
        is_text = str in (hints.get(key), *typing.get_args(hints.get(key)))
        values[key] = text if is_text else _parse_value(text)
    return build(config_class, values, "")


def echo(text: str) -> None:
    """Print text that a stranger may have written: no terminal escapes."""
    print(printable(text), flush=True)


def _parse_value(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return CONSTANTS.get(text, text)
