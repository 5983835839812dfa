"""A job: a run with its checked configuration and its name, before it starts.

This module does not import torch, so that an invalid configuration is reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from mingpt_ddp.config.builders import attribute_errors_to_user_code, run_code
from mingpt_ddp.config.config import (
    LIMITS,
    Config,
    drop_leftover_defaults,
    flatten,
    from_mapping,
    keys_in_name,
)
from mingpt_ddp.errors import ConfigError, UserError, pack_error, unpack_error

BATCH_SIZES = ("trainer.batch_size", "trainer.batch_size_per_rank")
EMPTY: Mapping[str, str] = MappingProxyType({})


class RunStatus(str, Enum):
    """How a run ended, as `status` in result.json."""

    COMPLETE = "complete"  # the run has reached its limits
    PREEMPTED = "preempted"  # a signal has stopped the run; the same command resumes it
    PRUNED = "pruned"  # a pruner has ended this job, because other jobs did better
    FAILED = "failed"  # an error has ended the run; result.json never has this status


class Reporter(Enum):
    """Who prints the error of a job before its process exits."""

    ONE_RANK = "one rank"  # every rank may have the error: one rank of each agent prints it
    THIS_RANK = "this rank"
    NOBODY = "nobody"  # the error is printed already, perhaps by workers


@dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    status: RunStatus
    directory: Path | None = None  # the run directory; None if the job failed before it had one
    value: float | None = None  # number by which a sweep ranks the job; None without a result
    error: UserError | None = None
    exit_code: int = 0  # exit code of the process, if no other job follows
    reporter: Reporter = Reporter.ONE_RANK
    signalled: bool = False  # the process received a signal, perhaps too late for this job
    # True if an earlier start of the job recorded this outcome. The job did not run again.
    recorded_earlier: bool = False
    # False for a job that did not run because its result could not change a decision of the sweep.
    was_needed: bool = True
    # True if no other job may follow in this process, because other ranks may not have failed.
    ends_process: bool = False
    # Only for a sweep: the directories to report, and the metric that ranks them. None means the
    # default metric.
    directories: tuple[Path, ...] = ()
    metric: str | None = None
    job: int = 0  # number of the job in its sweep

    @property
    def has_failed(self) -> bool:
        return self.status is RunStatus.FAILED

    def to_json(self) -> str:
        """Return the outcome as JSON, for a caller in Python or the parent of a local worker."""
        directories = self.directories or filter(None, [self.directory])
        return json.dumps(
            {
                "status": self.status.value,
                "error": self.error and pack_error(self.error),
                "exit_code": self.exit_code,
                "directories": [str(each.absolute()) for each in directories],
                "metric": self.metric,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Read an outcome that `to_json` has written in another process."""
        values = json.loads(text)
        error: Any = values["error"] and unpack_error(values["error"])
        return cls(
            RunStatus(values["status"]),
            error=error,
            exit_code=values["exit_code"],
            directories=tuple(map(Path, values["directories"])),
            metric=values["metric"],
        )


class EndsProcess(BaseException):
    """Leave Hydra and its sweepers with an outcome after which no other job may start.

    This is not a subclass of Exception, because Hydra or a sweeper would catch an Exception.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


@dataclass(frozen=True)
class SweepPlace:
    """The place of a job in its sweep."""

    number: int  # from 0
    label: str  # the swept overrides of the job, as text

    @classmethod
    def of(cls, number: int, swept: Mapping[str, str]) -> SweepPlace:
        """Return the place of a job in its sweep.

        Args:
            swept: Overrides of the job that the sweep varies, by key.
        """
        return cls(number, ", ".join(map("=".join, swept.items())) or "the only job")


@dataclass(frozen=True)
class Job:
    """A run with its checked configuration, before it starts."""

    config: Config
    # Keys from the command line, and the keys that contain them, as model.part_settings contains
    # model.part_settings.window.
    command_line_keys: frozenset[str] = frozenset()
    hydra_files: Mapping[str, str] = field(default_factory=dict)  # contents of .hydra/, by name
    # Directories in which `run_code` looks for the files that the configuration names as `code`.
    preset_directories: tuple[str, ...] = ()
    presets: Mapping[str, str] = field(default_factory=dict)  # the chosen preset of each group
    place: SweepPlace | None = None  # None outside of a sweep

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.config.run.root) / run_name(self.config)

    @property
    def number(self) -> int:
        """The number of the job in its sweep, from 0."""
        return self.place.number if self.place else 0

    def with_run(self, **changes: Any) -> Job:
        """Return the job with other values of the group `run`."""
        config = replace(self.config, run=replace(self.config.run, **changes))
        return replace(self, config=config)

    def to_json(self) -> str:
        """Return the job as JSON, for `Job.from_json` in another process."""
        values = {**self.config.to_dict(), "sweep": asdict(self.config.sweep)}
        return job_json(
            values,
            self.command_line_keys,
            self.preset_directories,
            presets=self.presets,
            hydra_files=self.hydra_files,
        )

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job that `to_json` or `job_json` has written. Run the user's files that it names.

        Raises:
            ConfigError, CodeError: A key, a value or a user's file is invalid.
        """
        return cls.build(**json.loads(text))

    @classmethod
    def build(
        cls,
        values: dict[str, Any],
        command_line_keys: Iterable[str],
        preset_directories: Iterable[str],
        presets: Mapping[str, str],
        hydra_files: Mapping[str, str],
    ) -> Job:
        """Check a composed configuration, run the user's files that it names, and return its job.

        Args:
            values: Plain values by group and key.
            command_line_keys: Keys from the command line, and the keys that contain them.
            preset_directories: Directories of presets, in Hydra's order.
            presets: The chosen preset of each group.
            hydra_files: Contents of `.hydra/`, by name.

        Raises:
            ConfigError, CodeError: A key, a value or a user's file is invalid.
        """
        keys = {*command_line_keys}
        if keys >= {*BATCH_SIZES}:
            raise ConfigError(
                "trainer.batch_size and trainer.batch_size_per_rank exclude each other; set one of "
                "them"
            )
        _prefer_command_line_limits(values.get("trainer"), keys)
        directories = tuple(preset_directories)
        with attribute_errors_to_user_code():
            run_code(values, [*map(Path, directories)], presets)
            for group in ("task", "optimizer"):
                drop_leftover_defaults(group, values.get(group), keys)
            config = from_mapping(values)
        return cls(config, frozenset(keys), hydra_files, directories, presets)


def job_json(
    values: Mapping[str, Any],
    command_line_keys: Iterable[str],
    preset_directories: Iterable[str],
    presets: Mapping[str, str] = EMPTY,
    hydra_files: Mapping[str, str] = EMPTY,
) -> str:
    """Return the arguments of `Job.build` as JSON. They are not checked."""
    arguments = {
        "values": values,
        "command_line_keys": sorted(command_line_keys),
        "preset_directories": [*preset_directories],
        "presets": {**presets},
        "hydra_files": {**hydra_files},
    }
    return json.dumps(arguments, default=str)


def _prefer_command_line_limits(trainer: Any, command_line_keys: Container[str]) -> None:
    """Let limits and a batch size from the command line replace other limits and batch sizes."""
    if "trainer.batch_size" in command_line_keys:
        trainer["batch_size_per_rank"] = None
    given = {limit for limit in LIMITS if f"trainer.{limit}" in command_line_keys}
    if any(trainer.get(limit) is not None for limit in given):
        trainer |= dict.fromkeys({*LIMITS} - given)


def run_name(config: Config, extra: dict[str, Any] | None = None) -> str:
    """Return `run.name`. If it is null, return `<data>-<model>-<digest>`.

    The name is the same on every rank, node and restart.

    Args:
        extra: See `Config.digest`.
    """
    if config.run.name:
        return config.run.name
    # The weights to start from determine the model, which is not known before the run reads them.
    weights = config.run.init_from
    model = config.model.name if weights is None else f"from_{PurePosixPath(weights).name}"
    return f"{_slug(config.data.label)}-{_slug(model)}-{config.digest(extra)}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", name)[:60]


def job_name(config: Config, swept: Mapping[str, str]) -> str:
    """Return the `run.name` of a job: the sweep's name, the readable overrides and a digest.

    The digest identifies the job.

    Args:
        config: The configuration of the job, in which `run.name` is the name of the sweep.
        swept: Overrides that the sweep varies, by key.
    """
    plain = config.to_dict()
    values = flatten(plain)
    # Keys and presets whose values are part of the digest of the configuration.
    covered = {*keys_in_name(plain), "model", "optimizer", "data"}
    uncovered = {}
    for key, text in swept.items():
        if key not in covered:
            # Use the parsed value, because 100 and 1e2 are the same job.
            uncovered[key] = json.dumps(values.get(key, text))
    extra = {"swept": uncovered} if uncovered else {}
    if config.run.name is None:
        return run_name(config, extra)
    return f"{config.run.name}/{_readable(swept)}-{config.digest(extra)}"


def existing_name(job: Job) -> str:
    """Return the `run.name` of a job of a sweep. Use the name of the job's directory if it exists.

    A directory whose name ends with the digest of the job belongs to the job. The readable part of
    its name may differ, because the sweep was edited.
    """
    name = PurePosixPath(run_name(job.config))
    if name.parent == PurePosixPath("."):  # the sweep does not have its own directory
        return str(name)
    digest = name.name.rpartition("-")[2]
    found = sorted(job.directory.parent.glob(f"*-{digest}"))
    return str(name.with_name(found[0].name) if found else name)


def _readable(swept: Mapping[str, str]) -> str:
    """Format overrides for the beginning of a directory's name."""
    text = ",".join(f"{key}={value}" for key, value in sorted(swept.items()))
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
    return safe.lstrip("._=,+-")[:100] or "job"
