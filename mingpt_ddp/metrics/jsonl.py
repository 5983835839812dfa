"""Metrics in `metrics.jsonl`, one JSON object per line, for reports, notebooks and restarts."""

import itertools
import json
import logging
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import reason
from mingpt_ddp.metrics.jsonl_columns import MARKERS, Column, Columns, Record, parse
from mingpt_ddp.storage.lines import MAX_LINE_BYTES, append_line, read_backwards, read_chunks
from mingpt_ddp.storage.storage import open_regular

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
MAX_BYTES = 1 << 28  # of the file: a million lines or more
KEYS = {  # of a record, by tag
    "train/loss": "train_loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/samples_per_s": "samples_per_s",
    "speed/mfu": "mfu",
    "speed/matmul_utilization": "matmul_utilization",
    "speed/step_ms": "step_ms",
    "speed/goodput": "goodput",
    "train/epoch": "epoch",
    "memory/peak_mib": "peak_mib",
}
# prefixes of tags that a task or model names: val_accuracy
EVALUATIONS = ("val/", "test/", "train/", "norms/")
TAGS = {key: tag for tag, key in KEYS.items()}


def own_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return by name what a task or a model has measured in training."""
    by_name = {}
    for tag, value in metrics.items():
        if tag.startswith("train/") and tag not in KEYS and not tag.startswith("train/loss_"):
            by_name[tag.removeprefix("train/")] = value
    return by_name


def to_record(step: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the record of metrics by tag; null stands for what is not finite."""
    values = {key: metrics[tag] for tag, key in KEYS.items() if tag in metrics}
    for tag, value in metrics.items():
        if tag not in KEYS and tag.startswith(EVALUATIONS):
            values[tag.replace("/", "_")] = value
    record: dict[str, Any] = {"step": step}
    for key, value in values.items():
        record[key] = value if math.isfinite(value) else None
    return record


def to_metrics(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a record by tag."""
    metrics = {}
    for key, value in record.items():
        tag = TAGS.get(key) or _tag_of_evaluation(key)
        if tag is not None and value is not None:
            metrics[tag] = value
    return metrics


def _tag_of_evaluation(key: str) -> str | None:
    for prefix in EVALUATIONS:
        if key.startswith(prefix.replace("/", "_")):
            return prefix + key[len(prefix) :]
    return None


class JSONLLogger:
    """Append whole lines to a file. If a write fails, lines are lost and training continues."""

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

    def _append(self, record: dict[str, Any]) -> None:
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
class MetricsHistory:
    """The measurements that led to the last step, each step once.

    Those that a restart or a rollback has repeated do not count.
    """

    # The steps of all records with a measurement, and whether they count.
    steps: Sequence[float] = ()
    counts: Sequence[int] = ()
    columns: dict[str, Column] = field(default_factory=dict)  # their values, by key
    starts: int = 0  # attempts
    faults: int = 0  # attempts that ended early and were followed by another
    rollbacks: int = 0
    is_complete: bool = False  # the last attempt has reached the end
    began: float = math.inf  # the first attempt, in seconds since 1970
    attempts: list[Record] = field(default_factory=list)  # the records of their starts

    @property
    def last_step(self) -> int | None:
        """The last step with a measurement."""
        last = max(itertools.compress(self.steps, self.counts), default=None)
        return None if last is None else int(last)

    @property
    def has_diverged(self) -> bool:
        """True if the last training loss that counts is not finite."""
        column = self.columns.get("train_loss", Column())
        for row, value in zip(reversed(column.rows), reversed(column.values), strict=True):
            if self.counts[row]:
                return math.isnan(value)
        return False

    def values(self, key: str) -> Sequence[float]:
        """Return the finite values of a key, in the order of the file."""
        return array("d", (value for _, value in self._points(key)))

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of all records that have a finite value."""
        return sorted(self._points(key), key=itemgetter(0))

    def _points(self, key: str) -> Iterator[tuple[int, float]]:
        column = self.columns.get(key, Column())
        for row, value in zip(column.rows, column.values, strict=True):
            if self.counts[row] and value == value:  # not NaN
                yield int(self.steps[row]), value

    @property
    def rows(self) -> list[Record]:
        """Return the records with a measurement, by step; None is what is not finite."""
        rows: list[Record] = [{"step": int(step)} for step in self.steps]
        for key, column in self.columns.items():
            for row, value in zip(column.rows, column.values, strict=True):
                rows[row][key] = value if value == value else None  # NaN
        return sorted(itertools.compress(rows, self.counts), key=itemgetter("step"))


def read_history(path: Path) -> MetricsHistory:
    """Read a `metrics.jsonl`, in time that grows with its lines alone.

    Drop records beyond the step of a following `start` or `rollback`, and a partial line at the end
    or before a `start`.

    Raises:
        DataError: any other line is not a record; names its number.
        OSError: the file cannot be read, is not a regular file, or exceeds a limit.
    """
    columns = Columns(path)
    for chunk in read_chunks(path, MAX_BYTES):
        columns.read(chunk)
    columns.end()
    markers = [record for _, record in columns.markers]
    attempts = [record for record in markers if "rollback" not in record]
    starts = [record for record in attempts if "start" in record]
    faults = 0
    for one, following in itertools.pairwise(attempts):
        faults += "start" in one and "start" in following
    times = [record["start"] for record in starts if record["start"] is not None]
    return MetricsHistory(
        columns.steps,
        _which_count(columns),
        columns.by_key,
        starts=len(starts),
        faults=faults,
        rollbacks=len(markers) - len(attempts),
        is_complete=bool(attempts) and "complete" in attempts[-1],
        began=min(times, default=math.inf),
        attempts=starts,
    )


def _which_count(columns: Columns) -> bytearray:
    """Return for each row whether no later start or rollback has repeated it."""
    counts = bytearray(len(columns.steps))
    end = len(counts)
    limit = math.inf  # by the starts and rollbacks that follow
    for begin, record in [*reversed(columns.markers), (0, {"step": 0})]:
        counts[begin:end] = map(limit.__ge__, columns.steps[begin:end])
        end = begin
        if "complete" not in record:
            limit = min(limit, float(record["step"]))
    return counts


@dataclass(frozen=True)
class HistoryEnd:
    """How the measurements of a run end."""

    step: int | None = None  # the last one that counts
    metrics: dict[str, float] = field(default_factory=dict)  # the finite ones of this step, by tag
    is_complete: bool = False  # the last attempt has reached the end
    reached: int = 0  # the highest step since, also of attempts that were repeated
    first_start: float | None = None  # seconds since 1970 when the first attempt began to train


def read_end(path: Path) -> HistoryEnd | None:
    """Read the first line of a `metrics.jsonl`, and its end backwards to the step before the last.

    Lines that are not records are skipped. Return None if there is no such file, or it cannot be
    read.
    """
    step: int | None = None
    row: Record = {}
    is_complete: bool | None = None
    reached = 0
    try:
        with open_regular(path) as file:
            first = parse(file.readline(MAX_LINE_BYTES)) or {}
        for record, counts in _backwards(path):
            if is_complete is None and "rollback" not in record:
                is_complete = "complete" in record
            if not MARKERS & record.keys():
                reached = max(reached, record["step"])
            if not counts:
                continue
            if step is not None and record["step"] < step:
                break
            row = record | row if record["step"] == step else record
            step = record["step"]
    except OSError:
        return None
    return HistoryEnd(step, to_metrics(row), bool(is_complete), reached, first.get("start"))


def read_since(path: Path, step: int) -> dict[int, Record]:
    """Read one record of each step from `step` on, with the values of all that count; backwards.

    Lines that are not records are skipped.

    Raises:
        OSError: as of `read_backwards`.
    """
    records: dict[int, Record] = {}
    for record, counts in _backwards(path):
        at = record["step"]
        if counts and at < step:
            break
        if counts:
            records[at] = record | records.get(at, {})
    return records


def _backwards(path: Path) -> Iterator[tuple[Record, bool]]:
    """Yield the records from the last one, and whether each is a measurement that counts.

    Those that a later start or rollback has repeated do not.
    """
    limit = math.inf  # by the starts and rollbacks that follow
    for record in filter(None, map(parse, read_backwards(path))):
        is_measurement = not MARKERS & record.keys()
        yield record, is_measurement and record["step"] <= limit
        if not is_measurement and "complete" not in record:
            limit = min(limit, record["step"])
