"""What a run has measured, one JSON object a line in `metrics.jsonl`: for reports and notebooks, never for training."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics.logger import MetricsLogger
from mingpt_ddp.storage.storage import open_regular

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
LONGEST_LINE = 1 << 20  # bytes
LARGEST = 1 << 28  # bytes of the file: two million lines
KEYS = {  # of a record, by the metric's tag
    "train/loss": "train_loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu",
    "val/loss": "val_loss",
}


class JSONLLogger(MetricsLogger):
    """Append to the file, each line as a whole. A full disk costs lines, not the run."""

    def __init__(self, path: Path) -> None:
        self._path, self._warned = path, False

    def start(self, step: int, world_size: int) -> None:
        self._append({"start": round(time.time(), 3), "step": step, "world_size": world_size})

    def rollback(self, step: int) -> None:
        self._append({"rollback": round(time.time(), 3), "step": step})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._append({"step": step, **{key: metrics[tag] for tag, key in KEYS.items() if tag in metrics}})

    def complete(self, step: int, config: dict[str, Any], metrics: dict[str, float]) -> None:
        self._append({"complete": round(time.time(), 3), "step": step})

    def _append(self, record: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            _append_line(self._path, json.dumps(plain).encode())
        except OSError as error:
            if not self._warned:
                log.warning("cannot write %s, training goes on without: %s", self._path, error.strerror or error)
            self._warned = True


def _append_line(path: Path, line: bytes) -> None:
    """The whole line or nothing, behind whatever stands there."""
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        line += b"\n"
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


@dataclass(frozen=True)
class MetricsHistory:
    """What counts of a history: what was measured on the way that led to the last step."""

    rows: list[dict[str, Any]]  # the records with a measurement, by step; the values are numbers, or None for NaN
    starts: int  # attempts
    faults: int  # attempts that ended before the run was complete, and were followed by another
    rollbacks: int
    began: float = math.inf  # the first attempt, in seconds since 1970

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every record that has it, finite."""
        return [(row["step"], float(row[key])) for row in self.rows if row.get(key) is not None]


def read_history(path: Path) -> MetricsHistory:
    """The records of the file at `path`.

    Those of steps that were made again are left out, and a line that its writer did not finish: the last one, or one
    behind which a new attempt begins.

    Raises:
        DataError: another line is not a record, or there is more than a run writes; the message names the line.
        OSError: the file cannot be read, or is no regular file.
    """
    return _drop_superseded(_lines(path))


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    torn: DataError | None = None
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if len(line) == LONGEST_LINE or file.tell() > LARGEST:
                raise DataError(f"{path} is more than a run writes, from line {number} on")
            record = _parse(line)
            if torn and not (record and "start" in record):
                raise torn
            torn = None if record else DataError(f"line {number} of {path} is not a record; delete the line")
            if record:
                yield record
        if torn and line.endswith(b"\n"):
            raise torn


def _parse(line: bytes) -> dict[str, Any] | None:
    """A step and numbers, else None."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line, parse_constant=lambda _: None)
        if isinstance(record, dict) and type(record.get("step")) is int and all(map(_is_number, record.values())):
            return record
    return None


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


def _drop_superseded(records: Iterable[dict[str, Any]]) -> MetricsHistory:
    rows: list[dict[str, Any]] = []
    starts = faults = rollbacks = 0
    began = math.inf
    complete = True
    for record in records:
        if "start" in record or "rollback" in record:
            rows = [row for row in rows if row["step"] <= record["step"]]
        if "start" in record:
            starts, faults, complete = starts + 1, faults + (not complete), False
            began = min(began, record["start"])
        elif "rollback" in record:
            rollbacks += 1
        elif "complete" in record:
            complete = True
        else:
            rows.append(record)
    return MetricsHistory(sorted(rows, key=lambda row: row["step"]), starts, faults, rollbacks, began)
