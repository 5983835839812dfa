"""`sweep.json`, what a sweep keeps from its first start on, and `failures.jsonl`."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.storage.lines import append_line, read_lines
from mingpt_ddp.storage.records import dump_json, read_json
from mingpt_ddp.storage.run_dir import FAILURES, SWEEP
from mingpt_ddp.storage.storage import atomic_write

MAX_CORES = 1 << 12  # and threads: torch cannot start any number of them
MAX_BYTES = 1 << 24  # of failures


@dataclass(frozen=True)
class Failure:
    """A job that has failed."""

    label: str  # its swept overrides
    directory: str  # its name
    count: int
    reason: str  # of the last time


def read_failures(directory: Path) -> dict[str, Failure]:
    """Return the jobs of a sweep that have failed and not succeeded since, by label; untrusted.

    A line that cannot be read, as of a killed process, counts as none.
    """
    found: dict[str, Failure] = {}
    with contextlib.suppress(OSError):
        for line in read_lines(directory / FAILURES, MAX_BYTES):
            with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
                _apply(json.loads(line), found)
    return found


def _apply(record: dict[str, Any], failures: dict[str, Failure]) -> None:
    """Count a failure; forget those of a job whose record has no reason: it has succeeded."""
    label = str(record["job"])
    directory, reason = str(record["directory"]), record["reason"]
    before = failures.pop(label, None)
    if reason is not None:
        count = before.count + 1 if before else 1
        failures[label] = Failure(label, directory, count, str(reason))


class SweepFile:
    """The cores and threads of a job, as JSON, and a line for each failure of one.

    Another number of jobs at a time must not change the threads, and with them the last bits.
    """

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: of the sweep; None: it has none of its own, and nothing is kept.
        """
        self._directory = directory
        self._values = read_json(directory / SWEEP) if directory else {}
        self.failures = read_failures(directory) if directory else {}  # by label of the job

    @property
    def cores(self) -> int | None:
        """The cores of a job; None before a sweep of several jobs at a time has begun."""
        return _count(self._values.get("cores"))

    def keep_cores(self, cores: int) -> None:
        """Keep the cores of a job."""
        self._write("cores", cores)

    def threads(self, ranks: int, default: int) -> int:
        """Return the threads of each rank of a job with so many ranks; keep the default."""
        kept = self._values.get("threads")
        threads = kept if isinstance(kept, dict) else {}
        found = _count(threads.get(str(ranks)))
        if found is None:
            self._write("threads", {**threads, str(ranks): default})
        return found or default

    def fail(self, label: str, directory: str | None, reason: str) -> None:
        """Keep why a job has failed."""
        self._append({"job": label, "directory": directory, "reason": reason})

    def succeed(self, label: str) -> None:
        """Forget the failures of a job that is now complete."""
        if label in self.failures:
            self._append({"job": label, "directory": None, "reason": None})

    def _append(self, record: dict[str, Any]) -> None:
        _apply(record, self.failures)
        if self._directory is None:
            return
        path = self._directory / FAILURES
        try:
            append_line(path, json.dumps(record).encode() + b"\n", MAX_BYTES)
        except OSError as error:
            raise RunError(f"cannot write {path}: {reason(error)}") from error

    def _write(self, key: str, value: Any) -> None:
        self._values = {**self._values, key: value}
        if self._directory is None:
            return
        path = self._directory / SWEEP
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            atomic_write(path, dump_json(self._values, indent=1))
        except OSError as error:
            raise RunError(f"cannot write {path}: {reason(error)}") from error


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= MAX_CORES else None
