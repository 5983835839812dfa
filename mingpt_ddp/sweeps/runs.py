"""What the directories of a sweep's jobs tell: configuration, result, history. Nothing in them is trusted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import DataError, RunError
from mingpt_ddp.metrics.jsonl import METRICS, MetricsHistory, read_history
from mingpt_ddp.storage.run_dir import load_yaml
from mingpt_ddp.storage.storage import open_regular, read_regular
from mingpt_ddp.sweeps.values import Value, identity, number, plain

SIGNS = ("config.yaml", METRICS, "result.json")  # of a run; one is enough
NOT_MADE_BY = ("run.name", "run.root", "run.resume", "data.cache_dir", "snapshot.path", "snapshot.fallback_path")
NAMED = ("model", "optimizer", "data")  # groups whose key `name` tells the preset
UNREADABLE = (OSError, ValueError, RecursionError)
LARGEST_CONFIG, LARGEST_RESULT = 1 << 16, 1 << 20  # bytes; a config.yaml of this size takes seconds


@dataclass(frozen=True)
class Job:
    """One run, as far as it got."""

    name: str  # its directory below the one that was named
    directory: Path
    status: str  # as result.json has it: complete, preempted, pruned ...; else running, stopped or unfinished
    config: dict[str, Value]  # of the last start, by dotted key
    result: dict[str, Any]
    history: MetricsHistory
    notes: list[str]  # what could not be read

    @cached_property
    def objective(self) -> float | None:
        """The final validation loss in nats per character; only a complete job has one."""
        return number(self.result.get("val_loss")) if self.status == "complete" else None

    @cached_property
    def val_loss(self) -> float | None:
        """The objective, or else the last validation loss that was measured."""
        if self.status == "complete":
            return self.objective
        series = self.history.series("val_loss")
        return series[-1][1] if series else number(self.result.get("val_loss"))

    @cached_property
    def step(self) -> int | None:
        """The last step that is known of."""
        rows = self.history.rows
        known = [number(self.result.get("step")), *([float(rows[-1]["step"])] if rows else [])]
        return max((int(step) for step in known if step is not None), default=None)

    @cached_property
    def tokens_per_s(self) -> float | None:
        """The median over the log steps, characters per second over all ranks."""
        series = self.history.series("tokens_per_s")
        return statistics.median(value for _, value in series) if series else None

    @property
    def faults(self) -> int | None:
        """That the run has survived: preemptions and kills alike."""
        return self.history.faults if self.history.starts else None


def read_jobs(directories: list[Path]) -> list[Job]:
    """The jobs in these directories, the best first, those without an objective last.

    Args:
        directories: runs, or directories that hold runs one or two levels below.

    Raises:
        RunError: one of them is no directory, or there is no run in it.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for directory in directories:
        if not directory.is_dir():
            raise RunError(f"{directory} is not a directory; name a run or the directory of a sweep")
        runs = list(_runs(directory, levels=2))
        if not runs:
            raise RunError(f"there is no run in {directory}; name a run or the directory of a sweep")
        base = directory.resolve()
        above = base if len(directories) == 1 and runs != [directory] else base.parent
        for run in runs:
            name = (base / run.relative_to(directory)).relative_to(above).as_posix()
            found.setdefault(run.resolve(), (run, name))
    jobs = [_read(path, name) for path, name in found.values()]
    return sorted(jobs, key=_rank)


def _rank(job: Job) -> tuple[bool, float, str]:
    return job.objective is None, math.inf if job.val_loss is None else job.val_loss, job.name


def best_of(jobs: list[Job]) -> Job | None:
    """The complete job with the lowest validation loss."""
    return min((job for job in jobs if job.objective is not None), key=_rank, default=None)


def varying(jobs: list[Job]) -> list[str]:
    """The keys in which jobs differ that have them.

    Not those that say where a run lives, nor those that only follow from which preset of their group a job has.
    """
    values: dict[str, set[str]] = {}
    of_preset: dict[str, dict[str, set[str]]] = {}
    for job in jobs:
        for key, value in job.config.items():
            values.setdefault(key, set()).add(identity(value))
            group = key.partition(".")[0]
            preset = identity(job.config.get(f"{group}.name")) if group in NAMED else ""
            of_preset.setdefault(key, {}).setdefault(preset, set()).add(identity(value))
    return [
        key
        for key, different in values.items()
        if len(different) > 1
        and key not in NOT_MADE_BY
        and (key.endswith(".name") or any(len(own) > 1 for own in of_preset[key].values()))
    ]


def _runs(directory: Path, levels: int) -> Iterator[Path]:
    if any((directory / sign).is_file() for sign in SIGNS):
        yield directory
    if levels:
        with contextlib.suppress(PermissionError):
            below = [path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir()]
            for path in sorted(below):
                yield from _runs(path, levels - 1)


def _read(path: Path, name: str) -> Job:
    notes: list[str] = []
    result = _load(path / "result.json", notes)
    later = [number for file in path.glob("config.*.yaml") if (number := re.fullmatch(r"config\.(\d+)", file.stem))]
    newest = max(later, key=lambda match: int(match[1]), default=None)
    config = _load(path / f"{newest[0] if newest else 'config'}.yaml", notes)
    history = MetricsHistory([], 0, 0, 0)
    try:
        history = read_history(path / METRICS)
    except FileNotFoundError:
        pass
    except (DataError, OSError) as error:
        notes.append(str(error))
    return Job(
        name,
        path,
        status=_status(path, result),
        config=_flat(config),
        result=result,
        history=history,
        notes=notes,
    )


def _status(path: Path, result: dict[str, Any]) -> str:
    """Whoever trains holds the directory's lock; to ask takes a moment, for which a start would wait.

    A run that is complete may be trained on with larger limits: its result is that of an earlier end.
    """
    otherwise = "stopped"
    try:
        with open_regular(path / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # there is none in a copy; some filesystems cannot tell
        otherwise = "unfinished"
    return str(result.get("status", otherwise))


def _load(path: Path, notes: list[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty one where there is none, with a note if it is for a bad reason."""
    try:
        content = parse(path)
        if isinstance(content, dict):
            return content
        notes.append(f"{path} holds no mapping")
    except FileNotFoundError:
        pass
    except UNREADABLE as error:
        notes.append(f"{path} cannot be read: {' '.join(str(error).split())[:200]}")
    return {}


def parse(path: Path) -> Any:
    """What a YAML or JSON file holds.

    Raises:
        any of UNREADABLE: it is not such a file.
    """
    if path.suffix == ".json":
        return json.loads(read_regular(path, LARGEST_RESULT))
    return load_yaml(read_regular(path, LARGEST_CONFIG))


def _flat(values: dict[str, Any]) -> dict[str, Value]:
    """Groups of keys by dotted key."""
    flat: dict[str, Value] = {}
    for group, keys in values.items():
        for key, value in (keys if isinstance(keys, dict) else {"": keys}).items():
            flat[f"{plain(group)}.{plain(key)}" if key != "" else str(plain(group))] = plain(value)
    return flat
