"""Errors that a user can fix: one line, exit code 2; and the words of messages."""

import re
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

LONGEST_LINE = 1000  # characters of an error, which may quote untrusted text
MAIN_SCRIPT = Path(__file__).resolve().parents[1] / "main.py"  # of a checkout


class UserError(Exception):
    """An error that the user can fix; the message is one line: what went wrong and what to do."""

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
    """The text has changed since a job of the sweep was complete: no other job would compare."""


class SnapshotError(UserError):
    """A snapshot is missing, damaged or incompatible."""

    kind = "snapshot error"


class RunError(UserError):
    """The run directory or the process group cannot be used."""

    kind = "run error"


class JoinError(RunError):
    """A rank did not join the process group in time; a restart may succeed."""


class StorageUnusableError(UserError):
    """The storage is full or may not be written: the same command fails until it is repaired."""

    kind = "storage error"


class StorageUnavailableError(UserError):
    """The storage does not respond; the same command may succeed later."""

    kind = "storage error"


TRANSIENT_ERRORS = (JoinError, StorageUnavailableError)  # after a restart


class TrainingError(UserError):
    """Training failed in the same way on all ranks and would fail again."""

    kind = "training error"


class OutputError(UserError):
    """Standard output cannot be written, as on a full disk."""

    kind = "output error"


class JobError(UserError):
    """A job of a sweep failed and logged why; the sweep continues."""

    kind = "job error"


def reason(error: Exception) -> str:
    """Return why a call failed: Python's own errors have a text, but no `strerror`."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error as JSON values: a UserError as its class here, any other as an OSError."""
    if not isinstance(error, UserError):
        return {"kind": "OSError", "message": reason(error), "errno": getattr(error, "errno", None)}
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == __name__)
    return {"kind": kind, "message": str(error.args[0])}


def unpack_error(packed: dict[str, Any], rank: int | None = None) -> Exception:
    """Return the error that `pack_error` packed.

    Args:
        rank: the rank that raised it, for the message of an OSError; None: there is one rank.
    """
    message = packed["message"]
    if packed["kind"] != "OSError":
        user_error: Exception = globals()[packed["kind"]](message)
        return user_error
    error = OSError(message if rank is None else f"rank {rank}: {message}")
    error.errno = packed["errno"]
    return error


def relative_path(path: Path) -> str:
    """Return a path as messages have it: relative to the working directory, if it is below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def counted(number: int, noun: str) -> str:
    """Return `1 job` or `2 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Return `0:01:30` for 90 seconds; a timedelta holds no more than some 1e13 seconds."""
    return str(timedelta(seconds=round(min(seconds, 1e13))))


def command(name: str = "train") -> str:
    """Return what a user types to start a command, as this process was started.

    That is `mingpt-ddp NAME`, `python main.py` in a checkout, or else `python -m mingpt_ddp NAME`.
    sys.argv[0] says how; `multiprocessing` sets that of its parent in a worker.
    """
    program = Path(sys.argv[0])
    if program.name == "mingpt-ddp":
        return f"mingpt-ddp {name}"
    if name == "train" and program.resolve() == MAIN_SCRIPT:
        return f"python {shlex.quote(str(program))}"
    return f"python -m mingpt_ddp {name}".removesuffix(" train")


def with_commands(text: str) -> str:
    """Write each `python -m mingpt_ddp NAME` in a help text as `command` does."""
    pattern = r"python -m mingpt_ddp\b(?: ([a-z_]+)(?![\w.]*=))?"
    return re.sub(pattern, lambda match: command(match[1] or "train"), text)


# Control characters except newline and tab, separators of lines and paragraphs, and characters that
# change the direction of text. A terminal or a browser would act on them.
NOT_PRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape characters that would act on a terminal or a page instead of being shown."""
    return NOT_PRINTABLE.sub(lambda match: _escaped(ord(match[0])), text)


def _escaped(character: int) -> str:
    return f"\\x{character:02x}" if character < 0x100 else f"\\u{character:04x}"
