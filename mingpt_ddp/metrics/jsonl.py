"""Write and read `metrics.jsonl`, one JSON object per line.

An attempt is one start of the processes of a run. Every attempt appends to the same file.
"""

import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic_core import from_json

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import DataError, reason
from mingpt_ddp.storage.lines import append_line, read_lines

log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]

METRICS = "metrics.jsonl"
MAX_BYTES = 1 << 28  # size limit of the file, enough for a million lines
MAX_VALUE = 1e300  # a line with a larger number is not a record
NUMBER_TYPES = {int, float}
# The key of a metric in a record, by its TensorBoard tag.
KEY_BY_TAG = {
    "train/loss": "train_loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/samples_per_s": "samples_per_s",
    "speed/mfu": "mfu",
    "speed/step_ms": "step_ms",
    "speed/goodput": "goodput",
    "train/epoch": "epoch",
    "memory/peak_mib": "peak_mib",
}
# After these prefixes, a task or a model may choose the rest of the tag, as in val/accuracy.
OPEN_PREFIXES = ("val/", "test/", "train/")
TAG_BY_KEY = {key: tag for tag, key in KEY_BY_TAG.items()}


def own_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Pick the training metrics that a task or a model has added. Return them by name."""
    by_name = {}
    for tag, value in metrics.items():
        if tag.startswith("train/") and tag not in KEY_BY_TAG and not tag.startswith("train/loss_"):
            by_name[tag.removeprefix("train/")] = value
    return by_name


def to_record(step: int, metrics: dict[str, float]) -> Record:
    """Convert metrics by tag to the record of a step. A value that is not finite becomes null."""
    values = {key: metrics[tag] for tag, key in KEY_BY_TAG.items() if tag in metrics}
    for tag, value in metrics.items():
        if tag not in KEY_BY_TAG and tag.startswith(OPEN_PREFIXES):
            values[tag.replace("/", "_")] = value
    record: Record = {"step": step}
    for key, value in values.items():
        record[key] = value if math.isfinite(value) else None
    return record


def to_metrics(record: Record) -> dict[str, float]:
    """Convert a record to metrics by tag. Values that are not finite (null) are left out."""
    metrics = {}
    for key, value in record.items():
        tag = TAG_BY_KEY.get(key) or _open_tag(key)
        if tag is not None and value is not None:
            metrics[tag] = value
    return metrics


def _open_tag(key: str) -> str | None:
    """Return the tag of a key such as val_accuracy, or None if the key has no open prefix."""
    for prefix in OPEN_PREFIXES:
        if key.startswith(prefix.replace("/", "_")):
            return prefix + key[len(prefix) :]
    return None


class JSONLLogger:
    """Append records to metrics.jsonl. If a write fails, its line is lost and training goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_failed = False

    def start(self, step: int, world_size: int) -> None:
        self._append({"start": round(time.time(), 3), "step": step, "world_size": world_size})

    def rollback(self, step: int) -> None:
        self._append({"rollback": round(time.time(), 3), "step": step})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._append(to_record(step, metrics))

    def complete(self, step: int, config: Config) -> None:
        self._append({"complete": round(time.time(), 3), "step": step})

    def _append(self, record: Record) -> None:
        try:
            append_line(self._path, json.dumps(record).encode() + b"\n", MAX_BYTES)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "cannot write %s, training continues without it: %s",
                    self._path,
                    reason(error),
                )
            self._has_failed = True


@dataclass(frozen=True)
class HistoryEnd:
    """The last measurements of a run, and how far it got."""

    step: int | None = None  # the last step with a measurement
    metrics: dict[str, float] = field(default_factory=dict)  # finite metrics of that step, by tag
    is_complete: bool = False  # True if the last attempt has reached the end of the run
    reached: int = 0  # the highest step that any attempt has logged
    first_start: float | None = None  # Unix time in seconds at which the first attempt began


@dataclass(frozen=True)
class MetricsHistory:
    """The measurements of a run that led to its last step.

    A restart or a rollback repeats steps. Only the last measurements of such a step count.
    """

    # The records with measurements, in the order of their steps. None stands for a value that is
    # not finite.
    rows: list[Record] = field(default_factory=list)
    attempts: list[Record] = field(default_factory=list)  # the `start` record of each attempt
    faults: int = 0  # number of attempts that ended early and were followed by another attempt
    rollbacks: int = 0
    is_complete: bool = False  # True if the last attempt has reached the end of the run
    reached: int = 0  # the highest step that any attempt has logged

    @property
    def starts(self) -> int:
        """Number of attempts."""
        return len(self.attempts)

    @property
    def began(self) -> float:
        """Unix time in seconds at which the first attempt began. Infinity if it is not known."""
        times = (record["start"] for record in self.attempts)
        return min((time for time in times if time is not None), default=math.inf)

    @property
    def columns(self) -> list[str]:
        """Names of all measured values, in the order in which they first appear."""
        return [*dict.fromkeys(key for row in self.rows for key in row if key != "step")]

    @property
    def last_step(self) -> int | None:
        """The last step with a measurement, or None if there is no measurement."""
        return self.rows[-1]["step"] if self.rows else None

    @property
    def has_diverged(self) -> bool:
        """True if the last training loss that counts is not finite."""
        losses = (row["train_loss"] for row in reversed(self.rows) if "train_loss" in row)
        return next(losses, 0.0) is None

    def values(self, key: str) -> list[float]:
        """Return the finite values of a key, in the order of their steps."""
        return [value for _, value in self.series(key)]

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return a pair (step, value) for each record with a finite value of this key."""
        return [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]

    def by_step(self) -> dict[int, Record]:
        """Merge all records of a step into one. Return the merged records by step."""
        records: dict[int, Record] = {}
        for row in self.rows:
            records[row["step"]] = records.get(row["step"], {}) | row
        return records

    @property
    def end(self) -> HistoryEnd:
        """The last step of the history with its metrics, without the other rows."""
        last: Record = {}
        for row in self.rows:
            if row["step"] == self.last_step:
                last |= row
        first_start = self.attempts[0]["start"] if self.attempts else None
        return HistoryEnd(
            self.last_step, to_metrics(last), self.is_complete, self.reached, first_start
        )


def read_history(path: Path) -> MetricsHistory:
    """Read the history of a run from its `metrics.jsonl`.

    A record `start` or `rollback` drops the earlier records of the steps that it repeats. A
    kill may leave a partial line, so a damaged line at the end of the file or before a `start` is
    dropped.

    Raises:
        DataError: Any other line is not a record. The message has the line's number.
        OSError: The file cannot be read, is not a regular file, or exceeds a limit.
    """
    rows: list[Record] = []
    attempts: list[Record] = []
    faults = rollbacks = reached = 0
    is_complete = False
    damaged = 0  # number of the previous line if that line is not a record, else 0
    for number, line in enumerate(read_lines(path, MAX_BYTES), start=1):
        record = parse_record(line)
        if damaged and not (record and "start" in record):
            raise DataError(f"line {damaged} of {path} is not a record; delete the line")
        damaged = 0 if record else number
        if not record:
            continue
        # The steps after the step of a start or a rollback are trained again.
        while rows and rows[-1]["step"] > record["step"]:
            rows.pop()
        if "start" in record:
            faults += bool(attempts) and not is_complete
            attempts.append(record)
            is_complete = False
        elif "rollback" in record:
            rollbacks += 1
        elif "complete" in record:
            is_complete = True
        else:
            rows.append(record)
            reached = max(reached, record["step"])
    return MetricsHistory(rows, attempts, faults, rollbacks, is_complete, reached)


def read_end(path: Path) -> HistoryEnd | None:
    """Read the end of a `metrics.jsonl`. Return None if the file is missing or damaged."""
    try:
        return read_history(path).end
    except (OSError, DataError):
        return None


def parse_record(line: bytes) -> Record | None:
    """Parse a line. Return None if it is not an object with a step and numbers."""
    try:
        record = from_json(line, allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    numbers = [value for value in record.values() if value is not None]
    if not NUMBER_TYPES.issuperset(map(type, numbers)) or max(map(abs, numbers)) >= MAX_VALUE:
        return None
    return record
