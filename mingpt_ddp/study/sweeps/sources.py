"""List the jobs of a sweep: all combinations of a grid, or the trials of a search."""

import itertools
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from mingpt_ddp.config.compose.hydra_utils import hydra_value, key_of
from mingpt_ddp.config.config import LIMITS, Config, values_in_name
from mingpt_ddp.config.job import SweepPlace
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.study.sweeps.checks import choices, is_seed

if TYPE_CHECKING:
    from mingpt_ddp.study.sweeps.search.study import Study

DRAW_TIMEOUT_S = 600.0  # time limit for rank zero to draw the values of a job


@dataclass(frozen=True)
class Source:
    """The jobs of a sweep by number, from 0. For a search, also its study."""

    # Returns the overrides of a job. All ranks call this for one job after another.
    overrides: Callable[[int], list[str]]
    swept: frozenset[str]  # keys that the sweep varies
    study: "Study | None"  # None for a grid, and on all ranks except rank zero

    def place(self, number: int, overrides: list[str] | None = None) -> SweepPlace:
        """Return the place of a job in the sweep.

        Args:
            overrides: The overrides of the job. None to look them up by its number.
        """
        overrides = self.overrides(number) if overrides is None else overrides
        values = {key_of(each): each.partition("=")[2] for each in overrides}
        return SweepPlace.of(number, {key: values[key] for key in values if key in self.swept})


def number_of_jobs(settings: SweepConfig, overrides: list[Override], our_sweeper: bool) -> int:
    """Return the number of jobs in a sweep, or 0 if only a sweeper of another package knows it."""
    if not our_sweeper and any(override.is_interval_sweep() for override in overrides):
        return 0
    if settings.is_search:
        return settings.trials
    return math.prod(map(len, choices(overrides, settings.zip or ())))


def check_search(config: Config, overrides: list[Override]) -> None:
    """Check the search space, the sampler and the pruner of a search.

    Raises:
        ConfigError: One of them is invalid, or Optuna is not installed.
    """
    from mingpt_ddp.study.sweeps.search.methods import pruner, sampler
    from mingpt_ddp.study.sweeps.search.space import search_space

    check(
        bool(search_space(overrides)),
        "a search needs values to draw, as in 'optimizer.lr=tag(log,interval(1e-4,1e-2))'",
    )
    sampler(config.sweep, 0)
    pruner(config)


def make_source(config: Config, overrides: list[Override], directory: Path, env: DistEnv) -> Source:
    """Make the source of a sweep's jobs. For a search, open its study.

    Args:
        config: Configuration of the first job.
        directory: Directory of the sweep, which rank zero has locked.

    Raises:
        UserError: The study in the directory belongs to a search with other settings, or cannot be
            used.
    """
    swept = frozenset(
        key_of(str(each.input_line)) for each in overrides if each.is_sweep_override()
    )
    # Give each job the objective, because the default one depends on all jobs of the sweep.
    is_given = any(each.get_key_element() == "sweep.metric" for each in overrides)
    metric = [] if is_given else [f"sweep.metric={hydra_value(config.sweep.metric)}"]
    if not config.sweep.is_search:
        values = choices(overrides, config.sweep.zip or ())
        if config.sweep.until is not None:
            # Run all settings with the first seed, then all settings with the next seed, and so on.
            values.sort(key=lambda words: not is_seed(words))
        combined = itertools.product(*values)
        jobs = [[*itertools.chain(*job), *metric] for job in combined]
        return Source(jobs.__getitem__, swept, None)
    study = env.call_on_rank_zero(lambda: _open_study(config, overrides, directory))
    fixed = [str(each.input_line) for each in overrides if not each.is_sweep_override()]

    def draw(number: int) -> list[str]:
        assert study is not None
        return [*fixed, *metric, *(f"{key}={value}" for key, value in study.values(number).items())]

    if env.world_size > 1:
        return Source(partial(_draw_in_lock_step, draw, env), swept, study)
    return Source(draw, swept, study)


def _draw_in_lock_step(draw: Callable[[int], list[str]], env: DistEnv, number: int) -> list[str]:
    """Draw the overrides of a job on rank zero, and return them on all ranks.

    Ranks get the overrides through the key-value store, because the process group of the job does
    not exist yet: the overrides decide how it is built. After a restart, the store may still hold
    the earlier overrides of this job, which are the same.
    """
    from mingpt_ddp.process.job_store import open_store

    store = open_store(env, number, DRAW_TIMEOUT_S)
    env.call_on_rank_zero(lambda: store.set("overrides", json.dumps(draw(number))))
    words: list[str] = json.loads(store.get("overrides"))
    return words


def _open_study(config: Config, overrides: list[Override], directory: Path) -> "Study":
    from mingpt_ddp.study.sweeps.search.space import search_space
    from mingpt_ddp.study.sweeps.search.study import Study

    space = search_space(overrides)
    return Study(directory, config, space, fixed_values(config, space))


def fixed_values(config: Config, swept: Collection[str]) -> dict[str, Any]:
    """Return the values, by dotted key, that all jobs share and that change their results."""
    values = config.to_dict()
    fixed = values_in_name(values) | {
        f"trainer.{limit}": values["trainer"][limit] for limit in LIMITS
    }
    for key in [*fixed]:
        # A swept preset, such as model=gpt_nano,gpt_mini, sets all keys of its group.
        if key in swept or key.partition(".")[0] in swept:
            del fixed[key]
    return fixed
