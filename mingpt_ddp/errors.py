"""Errors that a user can fix, and functions that format messages.

A command prints such an error as one line and exits with code 2.
"""

import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

LONGEST_LINE = 1000  # longest error in characters, because an error may quote untrusted text
MAIN_SCRIPT = Path(__file__).resolve().parents[1] / "main.py"  # exists only in a checkout


class UserError(Exception):
    """An error that the user can fix. Its message is one line: what went wrong, and what to do."""

    kind = "error"

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(super().__str__().split())}"


class ConfigError(UserError):
    """The configuration is invalid."""

    kind = "config error"


class CodeError(UserError):
    """A user's Python file raised an exception."""

    kind = "code error"


class DataError(UserError):
    """The training text cannot be read or used."""

    kind = "data error"


class ChangedTextError(DataError):
    """The training text has changed since an earlier job of the sweep ended.

    The results of later jobs would not be comparable with the result of that job.
    """


class SnapshotError(UserError):
    """A snapshot is missing, damaged or incompatible."""

    kind = "snapshot error"


class RunError(UserError):
    """The run directory or the process group cannot be used."""

    kind = "run error"


class JoinError(RunError):
    """A rank did not join the process group in time. A restart may succeed."""


class StorageUnusableError(UserError):
    """The storage is full or not writable. A restart would fail until the user repairs it."""

    kind = "storage error"


class StorageUnavailableError(UserError):
    """The storage does not respond. The same command may succeed later."""

    kind = "storage error"


TRANSIENT_ERRORS = (JoinError, StorageUnavailableError)  # a restart may succeed after these


class TrainingError(UserError):
    """Training failed in the same way on all ranks and would fail again."""

    kind = "training error"


class OutputError(UserError):
    """Standard output cannot be written, for example because the disk is full."""

    kind = "output error"


class JobError(UserError):
    """A job of a sweep failed and has logged its error. The sweep continues."""

    kind = "job error"


def reason(error: Exception) -> str:
    """Return the reason for a failed call: the error's `strerror`, its text, or its class name."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error as JSON values, for `unpack_error` in another process.

    A UserError keeps its class, if this module defines the class. Otherwise it becomes its nearest
    base class in this module. Any other error becomes an OSError.
    """
    if not isinstance(error, UserError):
        return {"kind": "OSError", "message": reason(error), "errno": getattr(error, "errno", None)}
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == __name__)
    return {"kind": kind, "message": str(error.args[0])}


def unpack_error(packed: dict[str, Any], rank: int | None = None) -> Exception:
    """Return the error that `pack_error` has packed.

    Args:
        packed: The values that `pack_error` has returned.
        rank: Rank that raised the error, for the message of an OSError. None if there is one rank.
    """
    message = packed["message"]
    if packed["kind"] != "OSError":
        user_error: Exception = globals()[packed["kind"]](message)
        return user_error
    error = OSError(message if rank is None else f"rank {rank}: {message}")
    error.errno = packed["errno"]
    return error


def relative_path(path: Path) -> str:
    """Format a path for messages: relative to the working directory, if the path is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def counted(number: int, noun: str) -> str:
    """Format a number with a noun: `1 job` or `2 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Format a duration: `0:01:30` for 90 seconds."""
    # A timedelta cannot hold much more than 1e13 seconds.
    return str(timedelta(seconds=round(min(seconds, 1e13))))


def command(name: str = "train") -> str:
    """Return the command line that starts a command in the same way as this process was started.

    This is `mingpt-ddp NAME`, `python main.py` (in a checkout) or `python -m mingpt_ddp NAME`.
    sys.argv[0] shows how the process was started. In a worker, `multiprocessing` sets sys.argv[0]
    to its value in the parent process.
    """
    program = Path(sys.argv[0])
    if program.name == "mingpt-ddp":
        return f"mingpt-ddp {name}"
    if name == "train" and program.resolve() == MAIN_SCRIPT:
        return f"python {shlex.quote(str(program))}"
    return f"python -m mingpt_ddp {name}".removesuffix(" train")


def with_commands(text: str) -> str:
    """Replace each `python -m mingpt_ddp NAME` in a help text by `command(NAME)`."""
    pattern = r"python -m mingpt_ddp\b(?: ([a-z_]+)(?![\w.]*=))?"
    return re.sub(pattern, lambda match: command(match[1] or "train"), text)


# Control characters (except newline and tab), line and paragraph separators, and characters that
# change the direction of text. A terminal or a browser would act on them.
NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape the characters that a terminal or a browser would obey instead of showing them."""
    return NOT_PRINTABLE.sub(lambda match: _escaped(ord(match[0])), text)


def _escaped(character: int) -> str:
    return f"\\x{character:02x}" if character < 0x100 else f"\\u{character:04x}"
