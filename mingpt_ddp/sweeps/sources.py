"""What the jobs of a sweep are: all combinations of a grid, or the trials of a study."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from mingpt_ddp.config.compose.hydra_utils import key_of
from mingpt_ddp.config.config import Config, named_values
from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.records import finite
from mingpt_ddp.sweeps.checks import expand

if TYPE_CHECKING:
    from mingpt_ddp.sweeps.search.trials import Trials

DRAW_TIMEOUT_S = 600.0  # for rank zero


@dataclass(frozen=True)
class Source:
    """The jobs of a sweep by number, from 0: what they are, and the study that judges them."""

    total: int
    overrides: Callable[[int], list[str]]  # of a job, in the order of the numbers; on all ranks
    swept: frozenset[str]  # keys that differ from job to job
    has_study: bool  # a search, or a grid with a pruner: every evaluation is reported
    trials: "Trials | None"  # of the study; on rank zero alone

    def label(self, number: int) -> str:
        """Return the swept overrides of a job as text."""
        words = [word for word in self.overrides(number) if key_of(word) in self.swept]
        return ", ".join(words) or "the only job"


def is_study(settings: SweepConfig) -> bool:
    """Return whether the evaluations of the jobs are recorded: by a search, or for a pruner."""
    return settings.sampler is not None or settings.pruner != "none"


def number_of_jobs(settings: SweepConfig, overrides: list[Override]) -> int:
    """Return the number of jobs of a sweep."""
    if settings.sampler is not None:
        return settings.trials
    return math.prod(len(expand(override)) for override in overrides)


def source_of(
    settings: SweepConfig, overrides: list[Override], first: Config, directory: Path, env: DistEnv
) -> Source:
    """Return the jobs of a sweep; write nothing.

    Args:
        first: the configuration of the first job.
        directory: of the sweep.

    Raises:
        UserError: the study cannot continue that of the directory.
    """
    total = number_of_jobs(settings, overrides)
    swept = frozenset(
        key_of(str(each.input_line)) for each in overrides if each.is_sweep_override()
    )
    if not is_study(settings):
        jobs = [[*job] for job in itertools.product(*map(expand, overrides))]
        return Source(total, jobs.__getitem__, swept, has_study=False, trials=None)
    trials = env.call_on_rank_zero(lambda: _trials_of(settings, overrides, first, directory))
    if env.world_size == 1 and trials is not None:
        return Source(total, trials.overrides, swept, has_study=True, trials=trials)
    shared = partial(_overrides_in_lock_step, trials, env)
    return Source(total, shared, swept, has_study=True, trials=trials)


def _overrides_in_lock_step(trials: "Trials | None", env: DistEnv, number: int) -> list[str]:
    """Return the overrides of a job that rank zero alone draws: it sends them to the others.

    The store of the process group carries them: they decide how the group of the job is built. It
    may still hold those of an attempt before a restart, which are the same.
    """
    from mingpt_ddp.distributed.group.rendezvous import open_store

    store = open_store(env, number, DRAW_TIMEOUT_S)
    if trials is not None:
        store.set("overrides", json.dumps(trials.overrides(number)))
    words: list[str] = json.loads(store.get("overrides"))
    return words


def _trials_of(
    settings: SweepConfig, overrides: list[Override], first: Config, directory: Path
) -> "Trials":
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
    return Trials(Study(directory, settings, space, listed, shared), settings, fixed, directory)


def _is_in(key: str, preset: Override) -> bool:
    """Return whether a key belongs to the group of which a preset is swept."""
    return key.partition(".")[0] == preset.get_key_element()


def _key_and_value(word: str) -> tuple[str, Any]:
    """Return the key of an override, and its value; as text unless it is a number."""
    key, _, text = word.partition("=")
    with contextlib.suppress(ValueError):
        number = json.loads(text)
        if finite(number) is not None:
            return key, number
    return key, text
