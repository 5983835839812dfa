"""Read and write `sweep.json`, the settings that a sweep keeps, and `failures.jsonl`."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.storage.lines import append_line, read_lines
from mingpt_ddp.storage.run_directory import FAILURES, SWEEP
from mingpt_ddp.storage.storage import atomic_write
from mingpt_ddp.storage.yaml_and_json import dump_json, read_json

MAX_CORES = 1 << 12  # limit for cores and threads, because the file is untrusted
MAX_BYTES = 1 << 24  # size limit of failures.jsonl
UNTIL_DECIDED = "until_decided"  # key in sweep.json


@dataclass(frozen=True)
class JobFailure:
    """A job that has failed."""

    label: str  # its swept overrides
    directory: str  # name of its directory, or "" if the job failed before that was known
    count: int
    reason: str  # reason of the last failure


def recorded_metric(directory: Path) -> str | None:
    """Return the `sweep.metric` of the latest start of a sweep. None stands for the default.

    The file is untrusted.
    """
    metric = read_json(directory / SWEEP).get("metric")
    return metric if isinstance(metric, str) and metric.strip("-") else None


def recorded_until_decided(directory: Path) -> Any:
    """Return the record of a comparison with until=decided, or None. The file is untrusted."""
    return read_json(directory / SWEEP).get(UNTIL_DECIDED)


def read_failures(directory: Path) -> list[JobFailure]:
    """Return the jobs of a sweep that have failed and not succeeded since. They are untrusted."""
    return [*dict.fromkeys(_failures(directory).values())]


def _failures(directory: Path) -> dict[str, JobFailure]:
    """Return the failures by key. A job has all the keys that `_keys` returns.

    Lines that cannot be read are skipped, because a kill may leave a partial line.
    """
    failures: dict[str, JobFailure] = {}
    for record in _records(directory):
        with contextlib.suppress(LookupError, TypeError):
            _apply(record, failures)
    return failures


def _records(directory: Path) -> Iterator[Any]:
    """Yield the recorded failures and successes of jobs, as untrusted JSON values."""
    with contextlib.suppress(OSError):
        for line in read_lines(directory / FAILURES, MAX_BYTES):
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def _keys(label: str, directory: str) -> list[str]:
    """Return the keys of a job: the digest at the end of its directory's name, and its label.

    The label is for a job that fails before its directory is known. It is less certain than the
    digest: the same values may be spelled in another way later, and a sweep with other fixed keys
    may have the same labels.
    """
    digest = directory.rpartition("-")[2]
    return [digest, label] if digest else [label]


def _find(label: str, directory: str, failures: dict[str, JobFailure]) -> JobFailure | None:
    """Return the failure of a job. The label counts only if one of the two has no directory."""
    for key in _keys(label, directory):
        failure = failures.get(key)
        if failure and (key != label or not (directory and failure.directory)):
            return failure
    return None


def _apply(record: dict[str, Any], failures: dict[str, JobFailure]) -> None:
    """Count a failure. A record without a reason is a success, which deletes the failures."""
    label, directory = str(record["job"]), str(record["directory"] or "")
    count = 1
    if before := _find(label, directory, failures):
        count += before.count
        for key in _keys(before.label, before.directory):
            if failures.get(key) is before:  # another job may have the same label
                del failures[key]
    if record["reason"] is not None:
        failure = JobFailure(label, directory, count, str(record["reason"]))
        failures |= dict.fromkeys(_keys(label, directory), failure)


class SweepFile:
    """The settings that a sweep keeps (metric, cores and threads of a job), and its failures.

    The number of threads is kept, so that another number of concurrent jobs does not change the
    last bits of results.
    """

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: Directory of the sweep. None if it has none, so that nothing is kept.
        """
        self._directory = directory
        self._values = read_json(directory / SWEEP) if directory else {}
        self._failures = _failures(directory) if directory else {}

    @property
    def cores(self) -> int | None:
        """The number of cores of a job. None before the first start of the sweep."""
        return _count(self._values.get("cores"))

    def keep_cores(self, cores: int) -> None:
        """Keep the number of cores of a job."""
        self._write("cores", cores)

    def keep_metric(self, metric: str | None) -> None:
        """Record the metric by which reports rank the jobs. None stands for the default."""
        if metric != self._values.get("metric"):
            self._write("metric", metric)

    def keep_until_decided(self, record: dict[str, Any]) -> None:
        """Record a comparison with until=decided."""
        if record != self._values.get(UNTIL_DECIDED):
            self._write(UNTIL_DECIDED, record)

    def threads(self, ranks: int, default: int) -> int:
        """Return the threads of each rank of a job with `ranks` ranks. Record a new default."""
        kept = self._values.get("threads")
        threads = kept if isinstance(kept, dict) else {}
        kept_threads = _count(threads.get(str(ranks)))
        if kept_threads is None:
            self._write("threads", {**threads, str(ranks): default})
        return kept_threads or default

    def failure_of(self, label: str, directory: str) -> JobFailure | None:
        """Return the failure of a job. None if it has not failed, or has succeeded since.

        Args:
            directory: Name of the job's directory, or "" if it is not known yet.
        """
        return _find(label, directory, self._failures)

    def fail(self, label: str, directory: str, reason: str) -> None:
        """Record the reason why a job has failed."""
        self._append({"job": label, "directory": directory or None, "reason": reason})

    def succeed(self, label: str, directory: str) -> None:
        """Forget the failures of a job that is now complete."""
        if self.failure_of(label, directory):
            self._append({"job": label, "directory": directory, "reason": None})

    def _append(self, record: dict[str, Any]) -> None:
        _apply(record, self._failures)
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
