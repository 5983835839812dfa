"""Metrics in `metrics.jsonl`, one JSON object per line, for reports, notebooks and restarts."""

import contextlib
import itertools
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import DataError, reason
from mingpt_ddp.storage.storage import read_regular

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
MAX_SIZE = 1 << 28  # bytes
END_BYTES = 1 << 14  # to find the last record in
MAX_LINES = 2_000_000  # which as records take more memory
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
EVALUATIONS = ("val/", "test/", "train/loss_", "norms/")
TAGS = {key: tag for tag, key in KEYS.items()}


def to_record(step: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the record of metrics by tag; null stands for what is not finite."""
    values = {key: metrics[tag] for tag, key in KEYS.items() if tag in metrics}
    for tag, value in metrics.items():
        if tag.startswith(EVALUATIONS):
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
            append_line(self._path, json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "cannot write %s, training continues without it: %s",
                    self._path,
                    reason(error),
                )
            self._has_failed = True


def append_line(path: Path, line: bytes) -> None:
    """Append the whole line or nothing; first terminate a partial line of a killed process."""
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"\n", b""):
            line = b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(end)
            raise


def last_step(path: Path) -> int:
    """Return the highest step of the measurements near the end of a file; 0 if there is none."""
    highest = 0
    if not path.is_file():  # opening a named pipe would block
        return highest
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - END_BYTES))
        for line in file.read().split(b"\n"):
            record = _parse(line)
            if record and not {"start", "rollback", "complete"} & record.keys():
                highest = max(highest, record["step"])
    return highest


@dataclass(frozen=True)
class MetricsHistory:
    """The measurements that led to the last step, each step once.

    Those that a restart or a rollback has repeated do not count.
    """

    # records with a measurement, by step; values are numbers, or None where not finite
    rows: list[dict[str, Any]]
    starts: int  # attempts
    faults: int  # attempts that ended early and were followed by another
    rollbacks: int
    is_complete: bool = False  # the last attempt has reached the end
    began: float = math.inf  # the first attempt, in seconds since 1970
    attempts: list[dict[str, Any]] = field(default_factory=list)  # the records of their starts

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of all records that have a finite value."""
        return [(row["step"], float(row[key])) for row in self.rows if row.get(key) is not None]

    def by_step(self) -> dict[int, dict[str, Any]]:
        """Return one record per step, which has the values of all records of that step."""
        merged: dict[int, dict[str, Any]] = {}
        for row in self.rows:
            merged.setdefault(row["step"], {}).update(row)
        return merged


def read_history(path: Path) -> MetricsHistory:
    """Read a `metrics.jsonl`.

    Drop records beyond the step of a following `start` or `rollback`, and a partial line at the end
    or before a `start`.

    Raises:
        DataError: any other line is not a record; names its number. Or there are more than
            MAX_LINES.
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    pieces = read_regular(path, MAX_SIZE).split(b"\n", MAX_LINES)
    if len(pieces) > MAX_LINES:
        raise DataError(f"{path} has more than {MAX_LINES:,} lines; shorten it")
    lines = list(map(_parse, pieces))
    for number, (line, following) in enumerate(itertools.pairwise(lines), start=1):
        if line is None and not (following and "start" in following):
            raise DataError(f"line {number} of {path} is not a record; delete the line")
    records = [line for line in lines if line]
    rows: list[dict[str, Any]] = []
    for record in records:
        if "start" in record or "rollback" in record:
            rows = [row for row in rows if row["step"] <= record["step"]]
        elif "complete" not in record:
            rows.append(record)
    attempts = [record for record in records if "start" in record or "complete" in record]
    starts = [record for record in attempts if "start" in record]
    faults = 0
    for one, following in itertools.pairwise(attempts):
        faults += "start" in one and "start" in following
    times = [start["start"] for start in starts if start["start"] is not None]
    return MetricsHistory(
        sorted(rows, key=lambda row: row["step"]),
        starts=len(starts),
        faults=faults,
        rollbacks=sum("rollback" in record for record in records),
        is_complete=bool(attempts) and "complete" in attempts[-1],
        began=min(times, default=math.inf),
        attempts=starts,
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a record, i.e. an object with a step and numbers; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line, parse_constant=lambda _: None)
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            return None
        if all(_is_number(value) for value in record.values()):
            return record
    return None


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)
