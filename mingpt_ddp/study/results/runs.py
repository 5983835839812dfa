"""Read untrusted run directories: configuration, result, metrics and status."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from glob import glob
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mingpt_ddp.config.recorded import PLACES, with_defaults
from mingpt_ddp.config.validation import hint_at
from mingpt_ddp.errors import DataError, RunError
from mingpt_ddp.metrics.jsonl import METRICS, MetricsHistory, read_history
from mingpt_ddp.storage.code_identity import changed_files, recorded_code, user_code_digest
from mingpt_ddp.storage.run_directory import RESULT, read_result, recorded_config
from mingpt_ddp.storage.storage import open_regular
from mingpt_ddp.storage.sweep_file import recorded_metric
from mingpt_ddp.study.results.objective import (
    LOSS,
    Objective,
    default_objective,
    loss_unit,
    objective_named,
)

T = TypeVar("T")
K = TypeVar("K")
Value = bool | int | float | str | list[Any] | None
RUN_FILES = ("config.yaml", METRICS, RESULT)  # a directory with one of these files is a run
PRESETS = ("model", "optimizer", "data")  # groups of keys whose `name` identifies the preset
ACCEPT_CODE = "run.accept_code"
DIVERGED = "diverged"  # status of a job whose last loss is not finite
MAX_NUMBER = 1e100  # larger numbers count as unknown
MAX_JSON_CHARS = 1000  # longest text of a value that is not a scalar; longer texts are cut


@dataclass(frozen=True)
class MetricsSummary:
    """A summary of a job's `metrics.jsonl`, which every report needs."""

    last: dict[str, float] = field(default_factory=dict)  # the last finite value of each key
    last_step: int | None = None  # the last step with a measurement
    # Tokens or samples per second over all ranks, as the median over the log steps.
    speed: float | None = None
    # An attempt lasts from one start of the run to its end. Number of attempts that ended early, by
    # a preemption or a kill, and were followed by another attempt. None if no attempt is recorded.
    faults: int | None = None
    began: float = math.inf  # Unix time in seconds at which the first attempt began
    has_diverged: bool = False  # True if the last training loss is not finite


@dataclass(frozen=True)
class RunRecord:
    """One run, which may be incomplete, as its files record it."""

    name: str  # the run's directory, relative to the directory from the command line
    directory: Path
    # complete, preempted or pruned, as in result.json, or diverged, running, stopped or unfinished
    status: str
    config: dict[str, Value]  # configuration of the last start, by dotted key
    result: dict[str, Any]  # content of result.json
    metrics: MetricsSummary
    notes: list[str]  # notes on files that cannot be read
    ranked_by: Objective = LOSS
    # The user's files that have changed since the job was trained.
    changed_code: list[str] = field(default_factory=list)

    @cached_property
    def objective(self) -> float | None:
        """The final value of the objective. None if the job is not complete."""
        return self.value if self.status == "complete" else None

    @cached_property
    def value(self) -> float | None:
        """The objective, or the last value of a job that is not complete."""
        return self._last(self.ranked_by)

    @cached_property
    def val_loss(self) -> float | None:
        """The final validation loss, or the last one of a job that is not complete."""
        return self._last(LOSS)

    def _last(self, measured: Objective) -> float | None:
        """Return the final value of a number, or its last value if the job is not complete."""
        if self.status == DIVERGED:
            return None
        if self.status != "complete" and measured.key in self.metrics.last:
            return number(self.metrics.last[measured.key])
        return number(measured.recorded_in(self.result))

    @cached_property
    def step(self) -> int | None:
        """The last recorded step."""
        steps = known([self.metrics.last_step, number(self.result.get("step"))])
        return max(map(int, steps), default=None)

    @cached_property
    def unit(self) -> str:
        """The unit in which the data is counted: samples or tokens."""
        return _unit(self.metrics.last)

    @property
    def history(self) -> MetricsHistory:
        """The measurements of the job, or an empty history if they cannot be read.

        Only the history that was read last stays in memory, because a report may have 1,000 jobs.
        """
        try:
            return _history(self.directory / METRICS)
        except (DataError, OSError):
            return MetricsHistory()

    @cached_property
    def code(self) -> str:
        """Digits that identify the versions of the user's files that trained the job. May be ""."""
        record = recorded_code(self.result)
        earlier = [str(each)[:8] for each in record.get("earlier", [])]
        return "+".join(filter(None, [*earlier, user_code_digest(record)]))


def read_jobs(
    directories: list[Path], metric: str | None = None, accept_code: bool = False
) -> list[RunRecord]:
    """Read the jobs in these directories. Sort them by objective; jobs without one come last.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        metric: The objective, written as in `sweep.metric`. If it is None and the sweeps of all
            jobs have the same metric, that metric is the objective. Otherwise the objective is the
            validation loss, or bits per byte if the tokenizers of the jobs differ.
        accept_code: Read all jobs as if they had run.accept_code=true.

    Raises:
        RunError: A path is not a directory, a directory contains no run, or no run has the metric.
    """
    runs_by_path: dict[Path, tuple[Path, str]] = {}
    for directory in directories:
        if not directory.is_dir():
            raise RunError(
                f"{directory} is not a directory; name a run or the directory of a sweep"
            )
        runs = find_runs(directory)
        if not runs:
            raise RunError(
                f"there is no run in {directory}; name a run or the directory of a sweep"
            )
        base = directory.resolve()
        above = base if len(directories) == 1 and runs != [directory] else base.parent
        for run in runs:
            name = (base / run.relative_to(directory)).relative_to(above).as_posix()
            runs_by_path.setdefault(run.resolve(), (run, name))
    jobs = [_read(path, name) for path, name in runs_by_path.values()]
    if accept_code:
        jobs = [replace(job, config={**job.config, ACCEPT_CODE: True}) for job in jobs]
    recorded = {recorded_metric(parent) for parent in {job.directory.parent for job in jobs}}
    named = metric or (recorded.pop() if len(recorded) == 1 else None)
    if named:
        objective = objective_named(named)
    else:
        objective = default_objective(loss_unit(job.config, job.directory) for job in jobs)
    jobs = [replace(job, ranked_by=objective) for job in jobs]
    if metric and all(job.value is None and job.status != "running" for job in jobs):
        names = dict.fromkeys(key for job in jobs for key in _numbers(job))
        raise RunError(f"metric={metric}: no run has this number; {hint_at(objective.key, names)}")
    return sorted(jobs, key=by_objective)


def _numbers(job: RunRecord) -> list[str]:
    """List the numbers that could rank a job: in its result, or else in its logged metrics."""
    names = [str(key) for key, value in job.result.items() if number(value) is not None]
    return names or [name for name in job.metrics.last if name.startswith(("val_", "train_"))]


def why_no_best(jobs: list[RunRecord]) -> str:
    """Explain why there is no best job."""
    objective = jobs[0].ranked_by
    statuses = [job.status for job in jobs]
    if DIVERGED in statuses and any(job.objective is not None for job in jobs):
        return "there is no best setting, since each of them has a diverged seed"
    is_lacking = objective is not LOSS and "complete" in statuses
    return f"no complete job has {objective.title}" if is_lacking else "no job is complete"


class Row(Protocol):
    """A job or a group of jobs, as a row of a table."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Value]: ...
    @property
    def objective(self) -> float | None: ...
    @property
    def value(self) -> float | None: ...
    @property
    def ranked_by(self) -> Objective: ...


def by_objective(row: Row) -> tuple[bool, bool, float, str]:
    """Return a sort key for rows. Rows without an objective come last, sorted by last value."""
    cost = None if row.value is None else row.ranked_by.cost(row.value)
    return row.objective is None, *by_value(cost), row.name


def by_value(value: float | None) -> tuple[bool, float]:
    """Return a sort key for values. None comes last."""
    return value is None, value or 0.0


def varying(jobs: Sequence[Row]) -> list[str]:
    """List the keys whose values differ between jobs, or between groups of jobs.

    Storage locations do not count. A key of a preset counts only if it differs between rows with
    the same preset.
    """
    values: dict[str, dict[Hashable, set[Hashable]]] = {}  # by key, then by preset
    for job in jobs:
        for key, value in job.config.items():
            group, _, name = key.partition(".")
            preset = None
            if group in PRESETS and name != "name":
                preset = identity(job.config.get(f"{group}.name"))
            values.setdefault(key, {}).setdefault(preset, set()).add(identity(value))
    keys = []
    for key, by_preset in values.items():
        is_varied = any(len(distinct) > 1 for distinct in by_preset.values())
        if is_varied and key not in PLACES:
            keys.append(key)
    return keys


def find_runs(directory: Path) -> list[Path]:
    """List the runs among a directory and its subdirectories, one and two levels below.

    Hidden and unreadable directories are skipped.
    """
    below = [*glob("*/", root_dir=directory), *glob("*/*/", root_dir=directory)]
    candidates = [directory, *sorted(directory / name for name in below)]
    return [path for path in candidates if is_run(path)]


def is_run(path: Path) -> bool:
    """Return True if a directory contains a file that only a run writes."""
    return any(os.path.isfile(path / name) for name in RUN_FILES)


def _read(path: Path, name: str) -> RunRecord:
    """Read the files of a run.

    Args:
        path: The run directory.
        name: Name of the run in the report.
    """
    result = read_result(path)
    config = recorded_config(path) or {}
    metrics = MetricsSummary()
    notes = []
    for file, content in ((RESULT, result), ("config.yaml", config)):
        if not content and (path / file).exists():
            notes.append(f"{path / file} cannot be read")
    try:
        if (path / METRICS).exists():
            metrics = _summary(_history(path / METRICS))
    except (DataError, OSError) as error:
        notes.append(str(error))
    flat = {}
    for group, keys in (with_defaults(config) if config else {}).items():
        for key, value in keys.items():
            flat[f"{plain(group)}.{plain(key)}"] = plain(value)
    # run.resume=never only chose a new directory. It does not distinguish jobs.
    if flat.get("run.resume") == "never":
        flat["run.resume"] = "auto"
    changed_code = _changed_code(recorded_code(result))
    status = _status(path, result, metrics)
    return RunRecord(name, path, status, flat, result, metrics, notes, changed_code=changed_code)


def _changed_code(code: dict[str, Any]) -> list[str]:
    """List the user's files that have changed since they were recorded.

    Return [] if the working directory has none of these files.

    Args:
        code: Record of the code in a result.json.
    """
    is_known = any(map(os.path.exists, code.get("files", {})))
    return changed_files(code) if is_known else []


def _history(path: Path) -> MetricsHistory:
    """Read a history. Reuse the history that was read last, unless the file has changed."""
    stat = path.stat()
    return _history_of(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _history_of(path: Path, size: int, mtime_ns: int) -> MetricsHistory:
    return read_history(path)


def _summary(history: MetricsHistory) -> MetricsSummary:
    """Summarize the measurements of a run."""
    last = {}
    for row in history.rows:
        for key, value in row.items():
            if value is not None:
                last[key] = value
    speeds = history.values(f"{_unit(last)}_per_s")
    return MetricsSummary(
        last,
        history.last_step,
        statistics.median(speeds) if speeds else None,
        history.faults if history.attempts else None,
        history.began,
        history.has_diverged,
    )


def _unit(names: Container[str]) -> str:
    """Return the unit of the data, given the names of the run's metrics."""
    return "samples" if "samples_per_s" in names else "tokens"


def _status(path: Path, result: dict[str, Any], metrics: MetricsSummary) -> str:
    """Return the status of a run. It is "running" if a process holds the lock of the directory.

    The lock is checked first: a complete run that continues with larger limits still has its
    earlier result.
    """
    locked = is_locked(path)
    if locked:
        return "running"
    status = str(result.get("status", "unfinished" if locked is None else "stopped"))
    if status != "complete":
        return DIVERGED if metrics.has_diverged else status
    loss = result.get(LOSS.key, 0.0)
    has_no_loss = loss is None or (isinstance(loss, float) and number(loss) is None)
    return DIVERGED if has_no_loss else status


def is_locked(path: Path) -> bool | None:
    """Return True if a process holds the lock of a directory.

    Return None if this cannot be known. Copies of runs have no lock, and some filesystems do not
    support flock.
    """
    try:
        with open_regular(path / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def plain(value: Any) -> Value:
    """Convert an untrusted value of a configuration to a scalar or a list of scalars.

    Other lists and mappings become JSON. Everything else becomes the name of its type.
    """
    if isinstance(value, list) and len(value) <= 100:
        is_flat = not any(isinstance(item, (list, dict)) for item in value)
        if is_flat:
            return [plain(item) for item in value]
    if isinstance(value, (list, dict)) and value:  # such as data.sources and data.val_paths
        with contextlib.suppress(ValueError, RecursionError):
            return _shortened(json.dumps(value, default=str))
    if value is None or isinstance(value, (bool, str)) or number(value) is not None:
        return value
    return str(value) if isinstance(value, float) else type(value).__name__


def _shortened(text: str) -> str:
    """Cut a long text and append a digest, so that different texts stay different."""
    if len(text) <= MAX_JSON_CHARS:
        return text
    return f"{text[:MAX_JSON_CHARS]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def number(value: Any) -> float | None:
    """Convert a finite number below MAX_NUMBER to a float. Return None for anything else."""
    return float(value) if type(value) in (int, float) and abs(value) < MAX_NUMBER else None


def known(values: Iterable[T | None]) -> list[T]:
    """Drop the values that are None."""
    return [value for value in values if value is not None]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group the items by their key. The items of a group keep their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def identity(value: Value) -> Hashable:
    """Return a hashable key. Equal values have equal keys: 1 and 1.0, but not 1 and true."""
    return isinstance(value, bool), tuple(value) if isinstance(value, list) else value
