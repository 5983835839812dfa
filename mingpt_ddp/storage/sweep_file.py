"""Read and write two files in the directory of a sweep: `sweep.json` and `failures.jsonl`.

`sweep.json` holds the settings that a sweep keeps for later starts. `failures.jsonl` records which
jobs have failed, and why.
"""

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

MAX_CORES = 1 << 12  # larger numbers of cores or threads in the untrusted file are ignored
MAX_BYTES = 1 << 24  # size limit of failures.jsonl
# Key in sweep.json: the record of a comparison with sweep.until=decided.
UNTIL_DECIDED = "until_decided"


@dataclass(frozen=True)
class JobFailure:
    """A job of a sweep that has failed, once or several times."""

    label: str  # the overrides in which the job differs from other jobs of the sweep
    directory: str  # name of the job's directory, or "" if the job failed before it was known
    count: int
    reason: str


def recorded_metric(directory: Path) -> str | None:
    """Return the `sweep.metric` of the latest start of a sweep. None stands for the default.

    The value is untrusted, because it is read from sweep.json.
    """
    metric = read_json(directory / SWEEP).get("metric")
    return metric if isinstance(metric, str) and metric.strip("-") else None


def recorded_until_decided(directory: Path) -> Any:
    """Return the untrusted record of a comparison that adds seeds until it is decided.

    Return None if the sweep is not such a comparison (`sweep.until=decided`).
    """
    return read_json(directory / SWEEP).get(UNTIL_DECIDED)


def read_failures(directory: Path) -> list[JobFailure]:
    """Return the jobs of a sweep that have failed, and have not succeeded since.

    The values are untrusted, because they are read from failures.jsonl.
    """
    return [*dict.fromkeys(_failures(directory).values())]


def _failures(directory: Path) -> dict[str, JobFailure]:
    """Read the failures of a sweep, by key. A job is listed under each key that `_keys` returns.

    Lines that cannot be parsed are skipped, because a killed process may leave a partial line.
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

    A job that fails before its directory is known has only a label. A label is less certain than a
    digest. The same values may be spelled differently at a later start, and a sweep with other
    fixed keys may have the same labels.
    """
    digest = directory.rpartition("-")[2]
    return [digest, label] if digest else [label]


def _find(label: str, directory: str, failures: dict[str, JobFailure]) -> JobFailure | None:
    """Return the failure of a job, or None if there is none.

    A failure with the same label belongs to the job only if the directory of one of the two is not
    known.
    """
    for key in _keys(label, directory):
        failure = failures.get(key)
        if failure and (key != label or not (directory and failure.directory)):
            return failure
    return None


def _apply(record: dict[str, Any], failures: dict[str, JobFailure]) -> None:
    """Update the failures with a record from failures.jsonl.

    A record with a reason is one more failure of its job. A record without a reason is a success,
    which deletes the failures of the job.
    """
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
    """The settings that a sweep keeps for later starts, and the failures of its jobs.

    The settings are the metric, and the cores and threads of a job. The number of threads is kept
    because the last bits of the results depend on it. It must not change with the number of
    concurrent jobs.
    """

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: Directory of the sweep. None if the sweep does not have a directory: then
                nothing is written.
        """
        self._directory = directory
        self._values = read_json(directory / SWEEP) if directory else {}
        self._failures = _failures(directory) if directory else {}

    @property
    def cores(self) -> int | None:
        """The number of cores of a job. None before the first start of the sweep."""
        return _count(self._values.get("cores"))

    def keep_cores(self, cores: int) -> None:
        """Record the number of cores of a job."""
        self._write("cores", cores)

    def keep_metric(self, metric: str | None) -> None:
        """Record the metric by which reports rank the jobs. None stands for the default."""
        if metric != self._values.get("metric"):
            self._write("metric", metric)

    def keep_until_decided(self, record: dict[str, Any]) -> None:
        """Record a comparison with sweep.until=decided."""
        if record != self._values.get(UNTIL_DECIDED):
            self._write(UNTIL_DECIDED, record)

    def threads(self, ranks: int, default: int) -> int:
        """Return the number of threads for each rank of a job.

        Args:
            ranks: Number of ranks of the job.
            default: The number to use, and to record, if none is recorded for `ranks` yet.
        """
        kept = self._values.get("threads")
        threads = kept if isinstance(kept, dict) else {}
        kept_threads = _count(threads.get(str(ranks)))
        if kept_threads is None:
            self._write("threads", {**threads, str(ranks): default})
        return kept_threads or default

    def failure_of(self, label: str, directory: str) -> JobFailure | None:
        """Return the failure of a job. None if it has not failed, or has succeeded since.

        Args:
            label: The overrides in which the job differs from other jobs of the sweep.
            directory: Name of the job's directory, or "" if it is not known yet.
        """
        return _find(label, directory, self._failures)

    def fail(self, label: str, directory: str, reason: str) -> None:
        """Record that a job has failed, and why."""
        self._append({"job": label, "directory": directory or None, "reason": reason})

    def succeed(self, label: str, directory: str) -> None:
        """Record that a job is complete, which deletes its failures."""
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
    """Return an untrusted number of cores or threads, or None if it is invalid."""
    return value if type(value) is int and 0 < value <= MAX_CORES else None
