"""Decide which jobs a sweep with sweep.until=decided still needs."""

import itertools
import json
from collections.abc import Collection
from pathlib import Path

from hydra.core.override_parser.types import Override

from mingpt_ddp.config.compose.hydra_utils import key_of
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.validation import check
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.results.sequential_record import (
    SequentialComparison,
    SequentialRecord,
    check_seeds,
)
from mingpt_ddp.study.sweeps.checks import choices, is_seed
from mingpt_ddp.study.sweeps.sources import fixed_values


def sequential_rule(config: Config, overrides: list[Override]) -> SequentialRecord | None:
    """Return the rule by which sweep.until=decided ends a sweep. Return None without this setting.

    Args:
        config: Configuration of the first job.
        overrides: The overrides of the sweep, with all values of each key.

    Raises:
        ConfigError: The sweep has no run.name, no settings to compare, or too few seeds.
    """
    settings = config.sweep
    if settings.until is None:
        return None
    check(
        config.run.name is not None and config.run.resume != "never",
        "sweep.until=decided records its decisions in the directory of the sweep; give the sweep a "
        "run.name, and leave out run.resume=never",
    )
    values = choices(overrides, settings.zip or ())
    # If the command line has run.seed=1,2 and ++run.seed=3,4, there are two lists of seeds, and the
    # check below refuses them.
    seed_lists = [*filter(is_seed, values)]
    seeds = [each[0].partition("=")[2] for each in itertools.chain(*seed_lists)]
    check(
        len(seed_lists) == 1 < len(seeds)
        and all(map(str.isdecimal, seeds))
        and len({*map(int, seeds)}) == len(seeds),
        "sweep.until=decided compares settings seed by seed; list different seeds, as in "
        "run.seed=1,2,3,4,5,6,7,8,9,10,11,12, and leave run.seed out of sweep.zip",
    )
    # The label of a setting has the keys in which settings differ: all keys with several values,
    # except the seed.
    varying = [words for words in values if len(words) > 1 and not is_seed(words)]
    labels = [", ".join(itertools.chain(*words)) for words in itertools.product(*varying)]
    check(
        len({*labels}) == len(labels) > 1,
        "sweep.until=decided compares settings; list different values of a key other than run.seed",
    )
    check_seeds(len(labels), len(seeds))
    swept = {key_of(str(each.input_line)) for each in overrides if each.is_sweep_override()}
    return SequentialRecord(
        labels,
        [str(int(seed)) for seed in seeds],
        settings.metric,
        settings.care,
        fixed=json.loads(json.dumps(fixed_values(config, swept))),
    )


class NeededJobs:
    """Decides on rank zero which jobs a sweep still needs.

    The jobs are numbered seed by seed: all settings with the first seed, then all with the second.
    """

    def __init__(self, directory: Path, file: SweepFile, rule: SequentialRecord) -> None:
        """
        Raises:
            ConfigError: The directory has a record of a different rule.
        """
        self._directory = directory
        self._comparison = SequentialComparison(directory, file, rule)

    def is_needed(self, number: int, failed: Collection[int]) -> bool:
        """Return True if the setting of a job still needs more seeds.

        Args:
            number: Number of the job.
            failed: Numbers of the failed jobs.
        """
        return self._comparison.needs_more_seeds(self._label(number), {*map(self._label, failed)})

    def n_needed_settings(self, failed: Collection[int]) -> int:
        """Count the settings that still need more seeds."""
        # With the first seed, there is exactly one job for each setting.
        first_jobs = range(len(self._comparison.record.settings))
        return sum(self.is_needed(number, failed) for number in first_jobs)

    def directory_of(self, number: int) -> Path | None:
        """Return the directory of a job, or None if its result has not been added."""
        label, seed = self._label(number), self._seed(number)
        name = self._comparison.record.runs.get(label, {}).get(seed)
        return self._directory / name if name else None

    def add(self, number: int, directory: Path) -> None:
        """Add the result of a job to the comparison, and record the decisions that it allows."""
        objective = objective_named(self._comparison.record.metric)
        cost = objective.cost(objective.value(read_result(directory)))
        self._comparison.add(self._label(number), self._seed(number), directory, cost)

    def _label(self, number: int) -> str:
        settings = self._comparison.record.settings
        return settings[number % len(settings)]

    def _seed(self, number: int) -> str:
        record = self._comparison.record
        return record.seeds[number // len(record.settings)]
