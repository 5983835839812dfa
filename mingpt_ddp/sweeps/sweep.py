"""A sweep: pre-flight before its first job, state shared by its jobs, and the report at its end."""

import contextlib
import logging
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
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
from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.config.validation import check
from mingpt_ddp.distributed.env import DistEnv, read_env
from mingpt_ddp.distributed.exit import FAILURE, ProcessExit, exit_process, signal_exit_code
from mingpt_ddp.distributed.machine import check_machine
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.metrics.objective import (
    BITS_PER_BYTE,
    LOSS,
    WHY_BITS_PER_BYTE,
    Objective,
    loss_unit,
    objective_of,
)
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.storage.run_dir import run_directory, with_run_name
from mingpt_ddp.sweeps import search
from mingpt_ddp.sweeps.jobs import look_up

log = logging.getLogger(__name__)

RunOnRankZero = Callable[[Callable[[], tuple[str, float | None]]], tuple[str, float | None]]
MAX_CHECKED_VALUES = 32  # of a key, besides the first
# Hydra creates the callback and calls jobs without arguments
_current: ContextVar["Sweep"] = ContextVar("sweep")


@dataclass
class Sweep:
    """The state of the sweep whose jobs this process runs or launches.

    Without a launcher, of a single job.
    """

    env: DistEnv = field(default_factory=DistEnv)
    directory: Path = Path()  # of all jobs, or run.root
    launcher: str = ""  # the class of Hydra's launcher
    planned: int = 0  # jobs
    lock: IO[str] | None = None  # on `directory`, if it is the sweep's own
    done: list[Path] = field(default_factory=list)  # directories of jobs
    n_done_before: int = 0  # of these, completed by an earlier start
    failed: list[str] = field(default_factory=list)  # labels of jobs
    exit_code: int = 0

    @staticmethod
    def current() -> "Sweep":
        """Return the active sweep, or a new one in a process started by an external launcher."""
        return _current.get(None) or Sweep()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the current sweep; afterwards shut down Ray, whose processes would survive
        os._exit.
        """
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()

    @property
    def objective(self) -> Objective:
        """What the jobs return: `_start` has decided it, in this process or in the one of an
        external launcher.
        """
        return BITS_PER_BYTE if hydra_utils.objective_metric() == BITS_PER_BYTE.metric else LOSS

    def start_job(
        self, config: Config, run_on_rank_zero: RunOnRankZero
    ) -> tuple[Config, float | None]:
        """Return the configuration of a job with its own run.name, and its objective if it is
        already complete.

        Outside a sweep return the configuration unchanged.
        """
        if not hydra_utils.is_multirun():
            return config, None
        objective = self.objective
        name, value = run_on_rank_zero(
            lambda: look_up(config, hydra_utils.swept_overrides(), objective)
        )
        config = with_run_name(config, name)
        directory = run_directory(config)
        if value is not None:
            self.n_done_before += directory not in self.done
            self.done.append(directory)
            log.info("%s: already complete, %s %.4f", directory, objective.title, value)
        else:
            total = f" of {self.planned}" if self.planned else ""
            log.info("job %d%s: %s", hydra_utils.job_number() + 1, total, hydra_utils.job_label())
        return config, value

    def finish_job(
        self, directory: Path, value: float | None, signalled: bool, exit_code: int
    ) -> float:
        """Record a complete job and return its objective; exit if it is incomplete, or if a signal
        ends the sweep.

        Args:
            value: the objective; None: the job is incomplete.
            signalled: this process received a signal, which is ignored if no job is left.
            exit_code: of this process if the job ends it.
        """
        if value is not None:
            self.done.append(directory)
            if (
                not signalled
                or not self.launcher
                or self.planned <= len(self.done) + len(self.failed)
            ):
                return value
        if self.launcher:
            log.info(
                "sweep: %d of %d jobs done; rerun the same command to resume",
                len(self.done),
                self.planned,
            )
        exit_process(None, signal_exit_code(read_env(), exit_code))

    def record_failed(self, message: str, code: int) -> JobError:
        """Log the failure of a job on rank zero and return the error to raise."""
        self.failed.append(hydra_utils.job_label())
        self.exit_code = FAILURE if FAILURE in (self.exit_code, code) else code
        self.env.call_on_rank_zero(lambda: log.error("%s", message))
        return JobError(f"{hydra_utils.job_label()} failed")

    @property
    def uses_external_launcher(self) -> bool:
        """Return whether other processes run the jobs, count them and log their errors."""
        return bool(self.launcher) and not self.launcher.startswith("hydra._internal.")

    def finish(self) -> None:
        """On rank zero, print the table, write the page and exit with an error if jobs failed."""
        if self.launcher:
            self.env.call_on_rank_zero(self._report)

    def _report(self) -> None:
        from mingpt_ddp.sweeps.sweep_report import PAGE, report

        is_own = self.lock and (self.done or self.uses_external_launcher)
        runs = [self.directory] if is_own else self.done
        try:
            if runs:
                print(report(runs, self.directory / PAGE))
        except RunError as error:  # e.g. no job has written a result that this machine can read
            log.warning("%s", error)
        if self.uses_external_launcher:
            exit_process(
                f"job error: {self.failed[0]}" if self.failed else None,
                FAILURE if self.failed else 0,
            )
        count = len(self.done) + len(self.failed)
        log.info(
            "sweep: %d jobs, %d already complete, %d failed",
            count,
            self.n_done_before,
            len(self.failed),
        )
        if self.failed:
            failed = "; ".join(self.failed)
            summary = JobError(
                f"{len(self.failed)} of {count} failed: {failed}; rerun the same command to retry"
            )
            if self.exit_code == FAILURE:
                exit_process(str(summary), FAILURE)
            ProcessExit().user_error(summary)


class Preflight(Callback):
    """Hydra's callback that checks a run or a sweep before anything is written."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _exit_on_error():
            _check_hydra_keys(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # so that Hydra's shuffle() has the same order on every rank and at every start
        random.seed(0)
        with _exit_on_error():
            _check_hydra_keys(config)
            _start(config, read_env(), Sweep.current())


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit on an exception, which Hydra would only log as a warning."""
    try:
        yield
    except Exception as error:
        explained = (
            error if isinstance(error, UserError) else ConfigError(hydra_utils.explain(error))
        )
        ProcessExit().user_error(explained)


def _start(config: DictConfig, env: DistEnv, sweep: Sweep) -> None:
    """Check the sweep, adapt Hydra's configuration, and lock the directory.

    Raises:
        UserError: the sweep cannot run.
    """
    overrides = _parse_overrides(config)
    jobs = _check_jobs(config.hydra, overrides, env)
    first = jobs[0]
    if search.is_search(config):
        search.check_search(config)
    if first.trainer.prune != "none" and first.run.name is None:
        raise ConfigError(
            "trainer.prune=median compares the jobs of one directory; give the sweep a run.name"
        )

    # disable usage reports if Ray is the launcher
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sweep.env = env
    sweep.launcher = str(config.hydra.launcher._target_)
    sweep.directory = Path(first.run.root, first.run.name or "")
    grid = math.prod(len(_expand(override)) for override in overrides)
    sweep.planned = OmegaConf.select(config, "hydra.sweeper.n_trials") or grid
    if first.run.name is not None:
        sweep.lock = env.call_on_rank_zero(lambda: acquire_lock(sweep.directory))
    # Hydra composes all of them first
    log.info("a sweep of %d jobs, in %s", sweep.planned, sweep.directory)
    objective = objective_of(loss_unit(flatten(job.to_dict())) for job in jobs)
    with read_write(config), open_dict(config):
        if objective is not LOSS:
            log.info("the objective is %s: %s", objective.title, WHY_BITS_PER_BYTE)
            config.hydra.overrides.hydra.append(f"+{hydra_utils.OBJECTIVE_KEY}={objective.metric}")
        constant = [
            hydra_utils.key_of(str(o.input_line)) for o in overrides if not o.is_sweep_override()
        ]
        excluded = (
            f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(repr, constant))}]"
        )
        config.hydra.overrides.hydra.append(excluded)
        config.hydra.sweep.dir = str(sweep.directory)
        if search.is_search(config):
            search.start_search(config, env)


def _check_hydra_keys(config: DictConfig) -> None:
    """Reject Hydra settings that would be ignored or that conflict with run.root and run.name."""
    check(
        not config.hydra.job.chdir,
        "hydra.job.chdir=true would move the jobs away from run.root; leave it out",
    )
    check(not config.hydra.verbose, "hydra.verbose has no effect here; leave it out")
    fixed = {
        "run.dir": ".",
        "sweep.dir": str(config.run.root),
        "sweep.subdir": ".",
        "output_subdir": None,
    }
    for key, only in fixed.items():
        if (value := OmegaConf.select(config, f"hydra.{key}")) != only:
            raise ConfigError(
                f"hydra.{key}={value} has no effect here: run.root and run.name set the run "
                "directory"
            )
    for key in ("max_batch_size", "n_trials", "n_jobs"):
        value = OmegaConf.select(config, f"hydra.sweeper.{key}")
        check(value is None or value >= 1, f"hydra.sweeper.{key}={value} must be at least 1")


def _parse_overrides(config: DictConfig) -> list[Override]:
    """Parse the overrides of the sweep, those of its preset first.

    The last one of a key wins, as in Hydra.
    """
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides = list({o.get_key_element(): o for o in parser.parse_overrides(words)}.values())
    # Optuna's plugin prefers a fixed value to an interval, regardless of order
    if search.is_search(config):
        with read_write(config), open_dict(config):
            config.hydra.sweeper.params = {}
            config.hydra.overrides.task = [override.input_line for override in overrides]
    for override in overrides:
        check(bool(_expand(override)), f"{override.input_line} has no values to sweep over")
        if override.is_interval_sweep() and not search.is_search(config):
            raise ConfigError(
                f"{override.input_line} is for a search: add sweep=optuna_lr, or list values"
            )
    return overrides


def _check_jobs(hydra: DictConfig, overrides: list[Override], env: DistEnv) -> list[Config]:
    """Compose the first job, and each other value (of many the first ones and the last) with the
    first of other keys.

    Returns:
        These configurations, that of the first job first.

    Raises:
        ConfigError: a job is invalid.
    """
    values = [_expand(override) for override in overrides]
    first = [choices[0] for choices in values]
    jobs = [first]
    for i, (_, *others) in enumerate(values):
        last = MAX_CHECKED_VALUES - 1
        jobs += [
            [*first[:i], other, *first[i + 1 :]] for other in others[:last] + others[last:][-1:]
        ]
    try:
        configs = [
            hydra_utils.to_config(compose(hydra.job.config_name, job), hydra, job) for job in jobs
        ]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_utils.explain(error)) from error
    for config in configs:
        if config.ddp.nproc_per_node != "gpu":
            check_machine(config)
    if any(config.ddp.nproc_per_node for config in configs) and not (
        env.is_standalone or env.has_local_rank
    ):
        raise ConfigError(
            "ddp.nproc_per_node cannot sweep where RANK is set; use torchrun ... main.py -m ..."
        )
    if len({(config.run.root, config.run.name) for config in configs}) > 1:
        raise ConfigError(
            "run.root and run.name must be the same for all jobs of a sweep; they name its "
            "directory"
        )
    return configs


def _expand(override: Override) -> list[str]:
    """Return one override per value of a sweep override.

    For an interval both ends and a value between them.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        start = value.start or 0
        end = value.end or 0
        inside = start + 0.618 * (end - start)  # rarely a whole number, like sampled values
        is_whole = isinstance(start, int) and isinstance(end, int)
        return [f"{key}={choice}" for choice in (start, int(inside) if is_whole else inside, end)]
    return [f"{key}={choice}" for choice in override.sweep_string_iterator()]
