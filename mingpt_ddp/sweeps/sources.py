"""What the jobs of a sweep are: all combinations of a grid, or the trials of a study."""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.types import Override

from mingpt_ddp.config.config import Config, named_values
from mingpt_ddp.config.schema import SweepConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.sweeps.checks import expand

DRAW_TIMEOUT_S = 600.0  # for rank zero


class Source(Protocol):
    """The jobs of a sweep by number, from 0. Its methods are called on rank zero, if not stated."""

    total: int
    judges: bool  # every evaluation is reported; the same on all ranks

    def begin(self) -> None:
        """Write what is kept between starts; the directory is locked."""

    def overrides(self, number: int) -> list[str]:
        """Return the overrides of a job, in the order of the numbers; on all ranks."""

    def is_settled(self, number: int, has_other_limits: bool) -> bool:
        """Return whether the job has ended for good, so that it need not even be composed."""

    def failed_before(self, number: int) -> str | None:
        """Return why the job has failed for good; None if it has not."""

    def label(self, number: int) -> str:
        """Return the swept overrides of a job as text."""

    def directory(self, number: int) -> Path:
        """Return the directory of a settled job that has not failed."""

    def start(self, number: int) -> None:
        """Record that a job starts, perhaps again."""

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        """Record an evaluation; return why the job is pruned, None if it goes on."""

    def finish(self, number: int, directory: Path) -> None:
        """Record the end of a complete or pruned job."""

    def fail(self, number: int, reason: str) -> None:
        """Record a failure."""


class Grid:
    """All combinations of the values; what the jobs have measured stands in their directories."""

    judges = False

    def __init__(self, overrides: list[Override]) -> None:
        self._jobs = [[*job] for job in itertools.product(*map(expand, overrides))]
        self._varies = [each.is_sweep_override() for each in overrides]
        self.total = len(self._jobs)

    def begin(self) -> None:
        pass

    def overrides(self, number: int) -> list[str]:
        return self._jobs[number]

    def is_settled(self, number: int, has_other_limits: bool) -> bool:
        return False

    def failed_before(self, number: int) -> str | None:
        return None

    def label(self, number: int) -> str:
        swept = itertools.compress(self._jobs[number], self._varies)
        return ", ".join(swept) or "the only job"

    def directory(self, number: int) -> Path:
        raise AssertionError("no job of a grid is settled")

    def start(self, number: int) -> None:
        pass

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        return None

    def finish(self, number: int, directory: Path) -> None:
        pass

    def fail(self, number: int, reason: str) -> None:
        pass


class LockStep:
    """The jobs of a source that rank zero alone has: it sends their overrides to the other ranks.

    The store of the process group carries them: they decide how the group of the job is built. It
    may still hold those of an attempt before a restart, which are the same.
    """

    def __init__(self, source: Source | None, total: int, judges: bool, env: DistEnv) -> None:
        """
        Args:
            source: on rank zero.
        """
        self._source = source
        self._env = env
        self.total = total
        self.judges = judges

    def overrides(self, number: int) -> list[str]:
        from mingpt_ddp.distributed.rendezvous import connect

        store = connect(self._env, number, DRAW_TIMEOUT_S)
        if self._source is not None:
            store.set("overrides", json.dumps(self._source.overrides(number)))
        words: list[str] = json.loads(store.get("overrides"))
        return words

    def is_settled(self, number: int, has_other_limits: bool) -> bool:
        return False  # all ranks ask rank zero once the job has its process group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # of a method that is called on rank zero


def in_lock_step(source: Source | None, total: int, judges: bool, env: DistEnv) -> Source | None:
    """Return the source of every rank, if there are several; `source` is that of rank zero."""
    return source if env.world_size == 1 else LockStep(source, total, judges, env)


def is_study(settings: SweepConfig) -> bool:
    """Return whether the evaluations of the jobs are recorded: by a search, or for a pruner."""
    return settings.sampler is not None or settings.pruner != "none"


def number_of_jobs(settings: SweepConfig, overrides: list[Override]) -> int:
    """Return the number of jobs of a sweep."""
    if settings.sampler is not None:
        return settings.trials
    return math.prod(len(expand(override)) for override in overrides)


def source_of(
    settings: SweepConfig, overrides: list[Override], first: Config, directory: Path
) -> Source:
    """Return the jobs of a sweep; write nothing.

    Args:
        first: the configuration of the first job.
        directory: of the sweep.

    Raises:
        UserError: the study cannot continue that of the directory.
    """
    if not is_study(settings):
        return Grid(overrides)
    from mingpt_ddp.sweeps.search.space import search_space
    from mingpt_ddp.sweeps.search.study import Study
    from mingpt_ddp.sweeps.search.trials import Trials

    fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    swept = [each for each in overrides if each.is_sweep_override()]
    shared = {}
    for key, value in named_values(first.to_dict()).items():
        if not any(key == each.get_key_element() or _is_in(key, each) for each in swept):
            shared[key] = value
    listed = None
    if settings.sampler is None:
        values = itertools.product(*map(expand, swept))
        listed = [dict(map(_key_and_value, words)) for words in values]
    space = {} if settings.sampler is None else search_space(swept)
    if settings.sampler is not None and not space:
        raise ConfigError(
            "a search needs values to draw, as in 'optimizer.lr=tag(log,interval(1e-4,1e-2))'"
        )
    study = Study(directory, settings, space, listed, shared)
    return Trials(study, settings, fixed, directory, number_of_jobs(settings, overrides))


def _is_in(key: str, preset: Override) -> bool:
    """Return whether a key belongs to the group of which a preset is swept."""
    return key.partition(".")[0] == preset.get_key_element()


def _key_and_value(word: str) -> tuple[str, Any]:
    """Return the key of an override, and its value; as text unless it is a number."""
    key, _, text = word.partition("=")
    with contextlib.suppress(ValueError):
        number = json.loads(text)
        if type(number) in (int, float) and math.isfinite(number):
            return key, number
    return key, text
