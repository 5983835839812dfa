"""Metrics in `metrics.csv`: a row per step, with the columns of metrics.jsonl."""

import csv
import io
import logging
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics.jsonl import METRICS, read_history, to_record
from mingpt_ddp.storage.storage import atomic_write

log = logging.getLogger(__name__)

NAME = "metrics.csv"


class CSVLogger:
    """Append rows to a file, and write it again from metrics.jsonl where that is not enough.

    So it must be called after the JSONLLogger. If a write fails, training continues without the
    file.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._source = directory / METRICS
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}  # the last row
        self._offset = 0  # where it begins, in bytes
        self._has_failed = False

    def start(self, step: int, world_size: int) -> None:
        self._guard(self._rebuild)

    def rollback(self, step: int) -> None:
        self._guard(self._rebuild)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._guard(self._append, to_record(step, metrics))

    def complete(self, step: int, config: Config) -> None:
        pass

    def _guard(self, write: Any, *args: Any) -> None:
        try:
            if not self._has_failed:
                write(*args)
        except (OSError, DataError) as error:
            self._has_failed = True
            log.warning("cannot write %s, training continues without it: %s", self._path, error)

    def _append(self, row: dict[str, Any]) -> None:
        """Append a row; replace the last one if it is of the same step."""
        if not row.keys() <= {*self._columns}:
            return self._rebuild()
        with open(self._path, "r+b", buffering=0) as file:
            if row["step"] == self._last["step"]:
                row = {**self._last, **row}
                file.truncate(self._offset)
            self._offset = file.seek(0, 2)
            file.write(self._line(row))
        self._last = row

    def _rebuild(self) -> None:
        rows = [*read_history(self._source).by_step().values()]
        self._columns = [*dict.fromkeys(key for row in rows for key in row)]
        head = {column: column for column in self._columns}
        lines = [self._line(row) for row in [head, *rows]]
        atomic_write(self._path, b"".join(lines) if rows else b"")
        self._last = rows[-1] if rows else {}
        self._offset = sum(map(len, lines[:-1]))

    def _line(self, row: dict[str, Any]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text).writerow([row.get(column) for column in self._columns])
        return text.getvalue().encode()
