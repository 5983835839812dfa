"""What the jobs of a sweep are: all combinations of a grid, or the trials of a study."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import Override

from mingpt_ddp.config.compose.hydra_utils import key_of
from mingpt_ddp.config.config import Config, named_values
from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.sweeps.checks import expand
from mingpt_ddp.sweeps.job import Job

if TYPE_CHECKING:
    from mingpt_ddp.sweeps.search.trial_jobs import Trials

DRAW_TIMEOUT_S = 600.0  # for rank zero


@dataclass(frozen=True)
class Source:
    """The jobs of a sweep by number, from 0: what they are, and the study that judges them."""

    overrides: Callable[[int], list[str]]  # of a job, in the order of the numbers; on all ranks
    swept: frozenset[str]  # keys that differ from job to job
    trials: "Trials | None"  # of the study; on rank zero alone

    def job(self, number: int) -> Job:
        """Return a job with its swept overrides."""
        words = [w.lstrip("+~") for w in self.overrides(number) if key_of(w) in self.swept]
        return Job(number, ", ".join(words) or "the only job")


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
    swept = frozenset(
        key_of(str(each.input_line)) for each in overrides if each.is_sweep_override()
    )
    trials = None
    if settings.is_study:
        trials = env.call_on_rank_zero(lambda: _trials_of(settings, overrides, first, directory))
    if settings.sampler is None:
        jobs = [[*job] for job in itertools.product(*map(expand, overrides))]
        return Source(jobs.__getitem__, swept, trials)
    if env.world_size == 1 and trials is not None:
        return Source(trials.overrides, swept, trials)
    return Source(partial(_overrides_in_lock_step, trials, env), swept, trials)


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
    from mingpt_ddp.sweeps.search.space import grid, search_space
    from mingpt_ddp.sweeps.search.study import Study
    from mingpt_ddp.sweeps.search.trial_jobs import Trials

    config = replace(first, sweep=settings)
    fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    swept = [each for each in overrides if each.is_sweep_override()]
    shared = {}
    for key, value in named_values(first.to_dict()).items():
        if not any(key == each.get_key_element() or _is_in(key, each) for each in swept):
            shared[key] = value
    if settings.sampler is None:
        listed, space = grid(swept)
        study = Study(directory, settings, space, shared)
        return Trials(study, config, fixed, directory, listed)
    space = search_space(swept)
    check(
        bool(space),
        "a search needs values to draw, as in 'optimizer.lr=tag(log,interval(1e-4,1e-2))'",
    )
    return Trials(Study(directory, settings, space, shared), config, fixed, directory)


def _is_in(key: str, preset: Override) -> bool:
    """Return whether a key belongs to the group of which a preset is swept."""
    return key.partition(".")[0] == preset.get_key_element()
