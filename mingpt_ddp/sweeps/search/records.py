"""Our records of the trials of a sweep: append-only lines of JSON, which are the truth.

Optuna's storage is derived from them.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.storage.lines import MAX_LINE_BYTES
from mingpt_ddp.storage.records import check_size
from mingpt_ddp.storage.storage import open_regular, sync_directory

MAX_BYTES = 1 << 30  # of the file
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Scalar = None | bool | int | float | str
# JSON has no number for the others.
Number = float | Literal["nan", "inf", "-inf"]
TrialNumber = Annotated[int, Field(ge=0)]
Step = Annotated[int, Field(ge=0, lt=2**63)]
Time = Annotated[float, Field(ge=0, le=2**34)]  # seconds since 1970


# `lag` and `order` of earlier versions: from which results a trial was drawn
@with_config({**STRICT, "extra": "ignore"})
@dataclass(frozen=True, kw_only=True)
class Header:
    """What all trials of a study share."""

    kind: Literal["header"] = "header"
    format: Literal[1] = 1
    sampler: str | None  # null: a grid
    space: dict[str, Any]  # Optuna's JSON of the distribution of each key
    objectives: Annotated[list[str], Field(min_length=1)]
    seed: Annotated[int, Field(ge=0)]
    fixed: dict[str, Any]


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The values of a trial."""

    kind: Literal["drawn"] = "drawn"
    trial: TrialNumber
    params: dict[str, Scalar]
    time: Time


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class Reported:
    """An evaluation of a job, and why it was pruned after that."""

    kind: Literal["report"] = "report"
    trial: TrialNumber
    step: Step
    value: Number
    pruned: str | None


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a job ended."""

    kind: Literal["finished"] = "finished"
    trial: TrialNumber
    outcome: Literal["complete", "pruned", "failed"]
    values: list[Number]
    reason: str
    job: str
    time: Time


@with_config(STRICT)
@dataclass(frozen=True, kw_only=True)
class Reopened:
    """A finished trial runs again."""

    kind: Literal["reopened"] = "reopened"
    trial: TrialNumber


Line = Header | Drawn | Reported | Finished | Reopened
LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


@dataclass(frozen=True)
class Report:
    value: float
    pruned: str | None


@dataclass
class TrialRecord:
    """What the lines say about a trial."""

    number: int
    params: dict[str, Any]
    started: float
    ended: float = 0.0
    reports: dict[int, Report] = field(default_factory=dict)
    outcome: str | None = None  # None: it runs, or was interrupted
    values: list[float] = field(default_factory=list)
    reason: str = ""
    job: str = ""
    failures: int = 0

    @property
    def pruned(self) -> str | None:
        """Return why a pruner has ended the trial."""
        reasons = [report.pruned for report in self.reports.values() if report.pruned]
        return reasons[0] if reasons else None


class Records:
    """The file of one sweep, whose directory this process has locked."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one; write nothing.

        Raises:
            RunError: it is damaged, other than by a torn last line.
        """
        self.path = path
        self.header: Header | None = None
        self.trials: list[TrialRecord] = []
        self.reports: list[tuple[int, int]] = []  # trial and step, in their order
        self._size = 0  # of the intact lines
        self._file: int | None = None
        for i, line in enumerate(self._read_lines(), start=1):
            try:
                self._apply(LINES.validate_json(line))
            except (ValidationError, ValueError, OverflowError) as error:
                raise self._damaged(f"line {i} is damaged") from error
            self._size += len(line) + 1

    def begin(self, header: Header) -> None:
        """Open the file for writing, cut a torn last line, and write a header if there is none."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._explained():
            self._file = os.open(self.path, flags, 0o666)
            os.ftruncate(self._file, self._size)
        if self.header is None:
            self.append(header)
            with contextlib.suppress(OSError):  # some file systems cannot
                sync_directory(self.path.parent)

    def append(self, line: Line) -> None:
        """Write a line durably; it counts once it is on the disk.

        Raises:
            RunError: the disk is full, or fails.
        """
        assert self._file is not None, "begin() first"
        data = LINES.dump_json(line) + b"\n"
        with self._explained():
            check_size(data, MAX_LINE_BYTES)
            if self._size + len(data) > MAX_BYTES:
                raise OSError(f"it is full: no more than {MAX_BYTES:,} bytes would be read")
            # what a write to a full disk, or a process killed in one, has left
            os.ftruncate(self._file, self._size)
            rest = memoryview(data)
            offset = self._size
            while rest:
                count = os.pwrite(self._file, rest, offset)
                rest = rest[count:]
                offset += count
            os.fsync(self._file)
        self._size = offset
        self._apply(line)

    def _read_lines(self) -> list[bytes]:
        """Return the complete lines."""
        try:
            file = open_regular(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._damaged(f"cannot be read: {reason(error)}") from error
        with file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise self._damaged(f"is larger than {MAX_BYTES} bytes")
            *lines, torn = file.read().split(b"\n")
        if max(map(len, [*lines, torn])) > MAX_LINE_BYTES:
            raise self._damaged(f"has a line of more than {MAX_LINE_BYTES} bytes")
        return lines

    def _apply(self, line: Line) -> None:
        """Change the state by a line.

        Raises:
            ValueError: the line does not follow from those before it.
        """
        if isinstance(line, Header):
            _require(self.header is None)
            self.header = line
            return
        _require(self.header is not None)
        if isinstance(line, Drawn):
            _require(line.trial == len(self.trials))
            self.trials.append(TrialRecord(line.trial, dict(line.params), line.time))
            return
        _require(line.trial < len(self.trials))
        trial = self.trials[line.trial]
        _require((trial.outcome is None) != isinstance(line, Reopened))
        if isinstance(line, Reported):
            _require(line.step not in trial.reports)
            trial.reports[line.step] = Report(float(line.value), line.pruned)
            self.reports.append((line.trial, line.step))
        elif isinstance(line, Finished):
            self._finish(trial, line)
        else:
            self._reopen(trial)

    def _finish(self, trial: TrialRecord, line: Finished) -> None:
        assert self.header is not None
        is_complete = line.outcome == "complete"
        _require(len(line.values) == len(self.header.objectives) or not is_complete)
        _require(_is_name(line.job))
        trial.outcome = line.outcome
        trial.values = [float(value) for value in line.values]
        trial.reason = line.reason
        trial.job = line.job or trial.job
        trial.ended = line.time
        trial.failures += line.outcome == "failed"

    def _reopen(self, trial: TrialRecord) -> None:
        """Let a trial run again, past the step at which it was pruned."""
        trial.outcome = None
        trial.values = []
        trial.reason = ""
        pruned = {step for step, report in trial.reports.items() if report.pruned}
        for step in pruned:
            del trial.reports[step]
        self.reports = [
            (number, step)
            for number, step in self.reports
            if number != trial.number or step not in pruned
        ]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {reason(error)}") from error

    def _damaged(self, what: str) -> RunError:
        return RunError(
            f"{self.path}: {what}; move the file away to begin a new study, or choose another "
            "run.name"
        )


def number_of(value: float) -> Number:
    """Return a number as the records hold it."""
    return float(value) if math.isfinite(value) else str(float(value))  # type: ignore[return-value]


def now() -> float:
    """Return the time for a line, in seconds since 1970."""
    return round(time.time(), 3)


def _require(ok: bool) -> None:
    if not ok:
        raise ValueError("unexpected line")


def _is_name(text: str) -> bool:
    """Return whether a text can only name something in a directory itself."""
    return text not in (".", "..") and not {"/", "\0"} & {*text}
