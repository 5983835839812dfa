"""What goes wrong through no fault of the program: one line for the user, exit code 2."""

from __future__ import annotations

import re

LONGEST_LINE = 1000  # characters of an error, part of which a stranger may have written


class UserError(Exception):
    """A mistake that the user can mend. The message is one line and says what to do."""

    kind = "error"

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(super().__str__().split())}"


class ConfigError(UserError):
    """The configuration cannot work."""

    kind = "config error"


class CodeError(UserError):
    """A Python file of the user's goes wrong."""

    kind = "code error"


class DataError(UserError):
    """The corpus cannot be read or used."""

    kind = "data error"


class SnapshotError(UserError):
    """A snapshot cannot be used for what was asked."""

    kind = "snapshot error"


class RunError(UserError):
    """The run directory or the process group cannot be used."""

    kind = "run error"


class StorageUnavailableError(UserError):
    """A storage does not answer now; the same start may succeed later."""

    kind = "storage error"


class TrainingError(UserError):
    """The training went wrong on all ranks alike, and would again."""

    kind = "training error"


class JobError(UserError):
    """A job of a sweep has failed, and has told why; the sweep goes on."""

    kind = "job error"


def printable(text: str) -> str:
    """The text without what a terminal would obey: C0 and C1 control characters other than newline and tab."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)
