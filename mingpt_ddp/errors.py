"""Errors that a user can fix: one line, exit code 2; and the words of messages."""

import re
import shlex
import sys
from pathlib import Path

LONGEST_LINE = 1000  # characters of an error, which may quote untrusted text
MAIN = Path(__file__).resolve().parents[1] / "main.py"  # of a checkout


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


class SnapshotError(UserError):
    """A snapshot is missing, damaged or incompatible."""

    kind = "snapshot error"


class RunError(UserError):
    """The run directory or the process group cannot be used."""

    kind = "run error"


class JoinError(RunError):
    """A rank did not join the process group in time; a restart may succeed."""


class StorageUnusableError(UserError):
    """The storage is full or may not be written: the same command fails until someone mends it."""

    kind = "storage error"


class StorageUnavailableError(UserError):
    """The storage does not respond; the same command may succeed later."""

    kind = "storage error"


class TrainingError(UserError):
    """Training failed in the same way on all ranks and would fail again."""

    kind = "training error"


class DamageError(TrainingError):
    """Ranks hold unequal copies of a tensor: the memory of one was damaged."""


class OutputError(UserError):
    """Standard output cannot be written, as on a full disk."""

    kind = "output error"


class JobError(UserError):
    """A job of a sweep failed and logged why; the sweep continues."""

    kind = "job error"


def reason(error: OSError) -> str:
    """Return why a call failed: Python's own errors have a text, but no `strerror`."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def relative_path(path: Path) -> str:
    """Return a path as messages have it: relative to the working directory, if it is below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def counted(number: int, noun: str) -> str:
    """Return `1 job` or `2 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def command(name: str = "train") -> str:
    """Return what a user types to start a command, as this process was started.

    That is `mingpt-ddp NAME`, `python main.py` in a checkout, or else `python -m mingpt_ddp.NAME`.
    sys.argv[0] says how; `multiprocessing` sets that of its parent in a worker.
    """
    program = Path(sys.argv[0])
    if program.name == "mingpt-ddp":
        return f"mingpt-ddp {name}"
    if name == "train" and program.resolve() == MAIN:
        return f"python {shlex.quote(str(program))}"
    return f"python -m mingpt_ddp.{name}".removesuffix(".train")


def with_commands(text: str) -> str:
    """Write each `python -m mingpt_ddp.NAME` in a help text as `command` does."""
    return re.sub(r"python -m mingpt_ddp\b\.?(\w*)", lambda m: command(m[1] or "train"), text)


def printable(text: str) -> str:
    """Escape control characters but newline and tab: a terminal would interpret them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)
