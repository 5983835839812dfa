"""`sweep.json`: what a sweep keeps from its first start on, and its failures."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.storage.records import dump_json, read_json
from mingpt_ddp.storage.run_dir import SWEEP
from mingpt_ddp.storage.storage import atomic_write

MAX_CORES = 1 << 12  # and threads: torch cannot start any number of them


@dataclass(frozen=True)
class Failure:
    """A job that has failed."""

    label: str  # its swept overrides
    directory: str  # its name
    count: int
    reason: str  # of the last time


class SweepFile:
    """The cores and threads of a job, and the failures of a sweep, as JSON.

    Another number of jobs at a time must not change the threads, and with them the last bits.
    """

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: of the sweep; None: it has none of its own, and nothing is kept.
        """
        self._path = directory / SWEEP if directory else None
        self._values = read_json(self._path) if self._path else {}

    @property
    def cores(self) -> int | None:
        """The cores of a job; None before a sweep of several jobs at a time has begun."""
        return _count(self._values.get("cores"), MAX_CORES)

    def keep_cores(self, cores: int) -> None:
        """Keep the cores of a job."""
        self._write("cores", cores)

    def threads(self, ranks: int, default: int) -> int:
        """Return the threads of each rank of a job with so many ranks; keep the default."""
        kept = self._values.get("threads")
        threads = kept if isinstance(kept, dict) else {}
        found = _count(threads.get(str(ranks)), MAX_CORES)
        if found is None:
            self._write("threads", {**threads, str(ranks): default})
        return found or default

    @property
    def failures(self) -> list[Failure]:
        """The jobs that have failed, and have not succeeded since; untrusted."""
        found = []
        for label, failure in self._failures().items():
            count = _count(failure.get("count")) or 1
            reason = f"{failure.get('reason')}"
            found.append(Failure(f"{label}", f"{failure.get('directory')}", count, reason))
        return found

    def fail(self, label: str, directory: str | None, reason: str) -> None:
        """Keep why a job has failed, and how often."""
        failures = self._failures()
        count = (_count(failures.get(label, {}).get("count")) or 0) + 1
        failures[label] = {"directory": directory, "count": count, "reason": reason}
        self._write("failures", failures)

    def succeed(self, label: str) -> None:
        """Forget the failures of a job that is now complete."""
        failures = self._failures()
        if failures.pop(label, None):
            self._write("failures", failures)

    def _failures(self) -> dict[str, Any]:
        failures = self._values.get("failures")
        if not isinstance(failures, dict):
            return {}
        return {label: each for label, each in failures.items() if isinstance(each, dict)}

    def _write(self, key: str, value: Any) -> None:
        self._values = {**self._values, key: value}
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, dump_json(self._values, indent=1))
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {reason(error)}") from error


def _count(value: Any, most: float = math.inf) -> int | None:
    return value if type(value) is int and 0 < value <= most else None
