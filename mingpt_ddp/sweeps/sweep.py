"""A sweep: what is checked before its first job, what its jobs have in common, how it ends."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.env import DistEnv, read_env, read_env_or_default
from mingpt_ddp.distributed.exit import FAILURE, exit_process, exit_user_error
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.storage.run_dir import acquire_lock, run_directory, with_run_name
from mingpt_ddp.sweeps import search
from mingpt_ddp.sweeps.jobs import Known, look_up

log = logging.getLogger(__name__)

CHECKED = 32  # values of a key before a sweep begins


@dataclass
class Sweep:
    """What this process knows about the sweep whose jobs it does or starts."""

    tells: bool = False  # it is the one that tells how the sweep went
    directory: Path = Path()  # of all jobs, or of the runs among which they are
    lock: IO[str] | None = None  # on a directory that is the sweep's own
    jobs: list[Path] = field(default_factory=list)  # their directories
    before: int = 0  # how many of them were done by an earlier start
    failed: list[str] = field(default_factory=list)
    code: int = 0  # the exit code of this process
    planned: int = 0  # jobs
    launcher: str = ""  # Hydra's, which starts the jobs; empty: this process does not lead the sweep, it does a job

    def joins(self, config: Config, first: Callable[[Callable[[], Known]], Known]) -> tuple[Config, float | None]:
        """A job is about to be done: its configuration, now with its own run.name, and its loss if it is done already.

        Args:
            first: calls a function on rank 0 and hands its value to all ranks.
        """
        name, done = first(lambda: look_up(config, hydra_utils.swept_overrides()))
        config = with_run_name(config, name)
        if done is not None:
            self.before += run_directory(config) not in self.jobs
            self.trained(config)
            log.info("%s: done before, validation loss %.4f", run_directory(config), done)
            return config, done
        of = f" of {self.planned}" if self.planned else ""
        log.info("job %d%s: %s", hydra_utils.job_number() + 1, of, hydra_utils.job_label())
        return config, None

    def trained(self, config: Config) -> None:
        self.jobs.append(run_directory(config))

    def fails(self, message: str, code: int) -> JobError:
        self.failed.append(hydra_utils.job_label())
        self.code = FAILURE if FAILURE in (self.code, code) else code
        if self.tells or not self.launcher:
            log.error("%s", message)
        return JobError(f"{hydra_utils.job_label()} has failed")

    @property
    def elsewhere(self) -> bool:
        """Other processes do the jobs: they count them, and tell what goes wrong."""
        return bool(self.launcher) and not self.launcher.startswith("hydra._internal.")

    def hears(self, error: JobError) -> None:
        """A job has failed, elsewhere perhaps the first of several; one that was done here is counted already."""
        if self.elsewhere:
            self.failed.append(error.args[0])

    def close(self) -> None:
        """End what a launcher has started here: this process will leave without ceremony, and Ray's would stay."""
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()

    def breaks_off(self) -> None:
        """A signal ends the sweep with the job at hand."""
        if self.tells:
            log.info("sweep: %d of %d jobs are done; the same command goes on", len(self.jobs), self.planned)

    @property
    def through(self) -> bool:
        """There is no job left for this process."""
        return not self.launcher or self.planned <= len(self.jobs) + len(self.failed)

    @property
    def hopeless(self) -> bool:
        """All jobs have failed, and with them a search for the best."""
        return bool(self.failed) and not self.jobs

    def end(self) -> None:
        """Tell what came out of it: a table, a page, and which jobs have failed."""
        self.close()
        if not self.tells:
            return
        from mingpt_ddp.sweeps.report import PAGE, report

        known = self.jobs or self.elsewhere
        own = [self.directory] if self.lock and known else self.jobs
        try:
            if own:
                print(report(own, self.directory / PAGE))
                log.info("the page is %s", self.directory / PAGE)
        except RunError as error:  # not one job has got so far, or this machine does not see them
            log.warning("%s", error)
        if self.elsewhere:
            exit_process(f"job error: {self.failed[0]}" if self.failed else None, FAILURE if self.failed else 0)
        count = len(self.jobs) + len(self.failed)
        log.info("sweep: %d jobs, %d of them done before, %d failed", count, self.before, len(self.failed))
        if not self.failed:
            return
        told = JobError(f"{len(self.failed)} of {count} failed: {'; '.join(self.failed)}; the same command tries again")
        if self.code == FAILURE:
            exit_process(str(told), self.code)
        exit_user_error(told, read_env_or_default(), job=0)  # an agent need not try it once more


current = Sweep()  # Hydra makes the callback and calls the jobs: they meet here


class Start(Callback):
    """Hydra's callback: before a sweep writes anything, see whether its jobs can be run at all."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            random.seed(0)  # a shuffled sweep has the same order on every rank, and when it is continued
            env = read_env()
            words, first = _check(config, env)
            _begin(config, env, words, first)
        except UserError as error:
            exit_user_error(error, read_env_or_default(), job=0)
        except Exception as error:  # Hydra would only warn, and sweep unchecked
            exit_user_error(ConfigError(hydra_utils.explain(error)), read_env_or_default(), job=0)


def _check(config: DictConfig, env: DistEnv) -> tuple[list[Override], Config]:
    """The words of the sweep, and the configuration of its first job.

    Raises:
        ConfigError: what cannot be swept.
    """
    _check_launch(config, env)
    words = _words(config)
    first = _check_jobs(config.hydra, words, env)
    if search.is_search(config):
        search.check_search(config)
    if first.trainer.prune != "none" and first.run.name is None:
        raise ConfigError("trainer.prune=median compares the jobs of one directory; give the sweep a run.name")
    return words, first


def _begin(config: DictConfig, env: DistEnv, words: list[Override], first: Config) -> None:
    """Tell Hydra what is ours to say, and own the directory."""
    global current
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # where Ray is the launcher: no reports to its makers
    directory = Path(first.run.root, first.run.name or "")
    with read_write(config), open_dict(config):
        constant = [hydra_utils.key_of(str(word.input_line)) for word in words if not word.is_sweep_override()]
        excluded = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(repr, constant))}]"
        config.hydra.overrides.hydra.append(excluded)
        config.hydra.sweep.dir = str(directory)
        study = search.study_of(config, env)
    own = first.run.name is not None and env.is_rank_zero
    current = Sweep(env.is_rank_zero, directory, acquire_lock(directory) if own else None)
    current.launcher = str(config.hydra.launcher._target_)
    grid = math.prod(len(_values(word)) for word in words)
    current.planned = OmegaConf.select(config, "hydra.sweeper.n_trials") or grid
    if current.tells:  # Hydra composes all jobs before the first, which takes a while
        log.info("a sweep of %d jobs, in %s", current.planned, directory)
    if study is not None:
        search.put_aside(study)
    if search.is_search(config):
        search.quiet()


def _check_launch(config: DictConfig, env: DistEnv) -> None:
    """What of Hydra's own keys no sweep here can have."""
    if config.hydra.job.chdir:
        raise ConfigError("hydra.job.chdir=true would move the jobs away from run.root; leave it out")
    for key, only in (("sweep.dir", str(config.run.root)), ("sweep.subdir", "."), ("output_subdir", None)):
        if (value := OmegaConf.select(config, f"hydra.{key}")) != only:
            raise ConfigError(f"hydra.{key}={value} has no use here: run.root and run.name say where the jobs are")
    batch = OmegaConf.select(config, "hydra.sweeper.max_batch_size")
    if batch is not None and batch < 1:
        raise ConfigError(f"hydra.sweeper.max_batch_size={batch} must be at least 1")


def _words(config: DictConfig) -> list[Override]:
    """The overrides of the sweep, those of a preset first; of a key that stands twice the last, as Hydra has it."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    every = parser.parse_overrides([*words, *config.hydra.overrides.task])
    parsed = list({word.get_key_element(): word for word in every}.values())
    if search.is_search(config):  # Optuna's plug-in takes a fixed value for the last, wherever it stands
        with read_write(config), open_dict(config):
            config.hydra.sweeper.params = {}
            config.hydra.overrides.task = [word.input_line for word in parsed]
    for word in parsed:
        if word.is_sweep_override() and not _values(word):
            raise ConfigError(f"{word.input_line} has no value to sweep over")
        if word.is_interval_sweep() and not search.is_search(config):
            raise ConfigError(f"{word.input_line} is for a search: add sweep=optuna_lr, or list values")
    return parsed


def _check_jobs(hydra: DictConfig, words: list[Override], env: DistEnv) -> Config:
    """Each key's values (of many the first and the last) beside the first of the others; the configuration of those.

    Raises:
        ConfigError: a job cannot be run.
    """
    values = [_values(word) for word in words]
    first = [choices[0] for choices in values]
    others = [(i, choice) for i, choices in enumerate(values) for choice in _some(choices[1:])]
    jobs = [first, *([*first[:i], choice, *first[i + 1 :]] for i, choice in others)]
    configs = []
    for job in jobs:
        try:
            configs.append(hydra_utils.to_config(compose(hydra.job.config_name, job), hydra))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(hydra_utils.explain(error)) from error
    if any(config.ddp.nproc_per_node for config in configs) and not (env.is_standalone or env.has_local_rank):
        raise ConfigError("ddp.nproc_per_node cannot sweep where RANK is set; use torchrun ... main.py -m ...")
    if any((other.run.root, other.run.name) != (configs[0].run.root, configs[0].run.name) for other in configs):
        raise ConfigError("run.root and run.name must be the same for all jobs of a sweep; they name its directory")
    return configs[0]


def _some(values: list[str]) -> list[str]:
    """A composition takes a moment: of a long range the last is the one that may be too much."""
    return values if len(values) <= CHECKED else [*values[: CHECKED - 1], values[-1]]


def _values(word: Override) -> list[str]:
    """The overrides that a word of the command line stands for; of an interval its ends and one in between."""
    if not word.is_sweep_override():
        return [str(word.input_line)]
    value, key = word.value(), word.get_key_element()
    if isinstance(value, IntervalSweep):
        start, end = value.start or 0, value.end or 0
        inside = start + 0.618 * (end - start)  # no whole number, as most that will be drawn
        whole = isinstance(start, int) and isinstance(end, int)
        return [f"{key}={choice}" for choice in (start, int(inside) if whole else inside, end)]
    return [f"{key}={choice}" for choice in word.sweep_string_iterator()]
