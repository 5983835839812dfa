"""Parse the arguments of all commands except train.

The arguments are URLs, and keys in the form `key=value`, `--key value` or `--key=value`.
"""

import contextlib
import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from mingpt_ddp import __version__
from mingpt_ddp.config.validation import build, check, hint_at, refuse_credentials
from mingpt_ddp.errors import with_commands
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv, has_parent_launcher
from mingpt_ddp.process.exit import exit_process
from mingpt_ddp.process.root_cause import cli_errors
from mingpt_ddp.process.terminal import drop_unwritten_log, echo
from mingpt_ddp.storage.urls import check_can_open

T = TypeVar("T")
Command: TypeAlias = Callable[[Any], int]  # takes the dataclass of its keys, returns an exit code
CONSTANTS = {"null": None, "None": None, "true": True, "false": False}
# Metadata of a field whose text is not searched for passwords, since any text may look like a URL.
FREE_TEXT = {"free_text": True}


def run_command(usage: str, command: Command | Mapping[str, Command]) -> None:
    """Call a command with the arguments of the command line, and exit with its exit code.

    Args:
        usage: Text of --help.
        command: The command. Or several commands by name, one of which the first argument selects.
            The type of the parameter `config` of a command defines its keys.
    """
    words = sys.argv[1:]
    logs.to_console(DistEnv())
    with cli_errors():
        if text := answer(usage, words):
            echo(text)
            sys.exit(0)
        if isinstance(command, Mapping):
            name = words.pop(0)
            refuse_credentials("the name of the command", name)
            check(name in command, f"{name} is not a command; {hint_at(name, command)}")
            command = command[name]
        code = command(parse_arguments(typing.get_type_hints(command)["config"], words))
        if has_parent_launcher():  # see `process_exit`: threads of torch may abort a normal exit
            exit_process(None, code)
        drop_unwritten_log()
        sys.exit(code)


def answer(usage: str, words: list[str], needs_arguments: bool = True) -> str | None:
    """Return the text that --help or --version prints. Return None for other command lines.

    Args:
        needs_arguments: Return the usage also if there are no arguments.
    """
    if (needs_arguments and not words) or {"-h", "--help"} & {*words}:
        return with_commands(usage)
    # Look only at the first word. A later word may be the value of a key.
    return f"mingpt_ddp {__version__}" if words[:1] == ["--version"] else None


def parse_arguments(config_class: type[T], words: list[str]) -> T:
    """Build the configuration of a command from its arguments.

    The first field of the dataclass takes the arguments without a key: one URL, or a list of
    directories. A field of type str takes its text literally.

    Raises:
        ConfigError: An argument is malformed, a key is repeated, or a key or value is invalid.
    """
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    first, *_ = fields
    values: dict[str, Any] = {}
    for word, key, text in _split(words, fields):
        name = key or first
        if not (name in fields and fields[name].metadata.get("free_text")):
            refuse_credentials(name, text, one_url=True)
        check(name != first or text.strip(), f"{name} is empty; name a run directory")
        if hints.get(name) == list[str]:
            text = [*values.pop(name, []), text]
        elif name == first:
            check_can_open(name, text)
        if key:
            message = f"{name} is given twice; give it one value"
        else:
            keys = ", ".join([*fields][1:])
            message = f"{word} does not have the form key=value; the keys are {keys}"
        check(name not in values, message)
        is_text = str in (hints.get(name), *typing.get_args(hints.get(name)))
        values[name] = text if is_text else parse_value(text)
    return build(config_class, values, "")


def _split(words: list[str], known: Container[str]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each argument, its key (None for a URL) and its value.

    An argument with a slash or a colon before its first = is a URL, because the names of the job
    directories of a sweep contain a =.
    """
    rest = iter(words)
    for word in rest:
        key, equals, text = word.partition("=")
        key = key.replace(".", "_") if equals else key  # data.path is the field data_path
        if word.startswith("--"):
            key = key[2:].replace("-", "_").replace(".", "_")
            text = text if equals else next(rest, "--")
            check(
                bool(equals) or key not in known or text[:2] != "--",
                f"{word} has no value; write {word}=VALUE",
            )
            yield word, key, text
        elif equals and not re.search("[/:]", key):
            yield word, key, text
        else:
            check(word[:1] != "-", f"{word} is not an option; write key=value or --key value")
            yield word, None, word


def human_size(size: int) -> str:
    """Format a number of bytes in a suitable unit: 1.5 MiB."""
    power = min((max(size, 1).bit_length() - 1) // 10, 4)  # the unit is 1024**power bytes
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def parse_value(text: str) -> Any:
    """Convert a text to a number, null, true or false. Return any other text unchanged."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return CONSTANTS.get(text, text)
