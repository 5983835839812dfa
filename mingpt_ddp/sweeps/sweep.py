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

from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.distributed.env import DistEnv, read_env
from mingpt_ddp.distributed.exit import FAILURE, ProcessExit, exit_process, signal_exit_code
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
from mingpt_ddp.sweeps.sweep_checks import (
    check_hydra_keys,
    check_jobs,
    expand,
    parse_overrides,
)

log = logging.getLogger(__name__)

RunOnRankZero = Callable[[Callable[[], tuple[str, float | None]]], tuple[str, float | None]]
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
        """Make this the current sweep; then shut down Ray, whose processes survive os._exit."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()

    @property
    def objective(self) -> Objective:
        """What the jobs return.

        `_start` has decided it, in this process or in the one of an external launcher.
        """
        return BITS_PER_BYTE if hydra_utils.objective_metric() == BITS_PER_BYTE.metric else LOSS

    def start_job(
        self, config: Config, run_on_rank_zero: RunOnRankZero
    ) -> tuple[Config, float | None]:
        """Return the configuration of a job with its run.name, and its objective if it is complete.

        Outside a sweep return the configuration unchanged.
        """
        if not hydra_utils.is_multirun():
            return config, None
        objective = self.objective
        swept = hydra_utils.swept_overrides()
        name, value = run_on_rank_zero(lambda: look_up(config, swept, objective))
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
        """Record a complete job and return its objective.

        Exit if the job is incomplete, or if a signal ends the sweep.

        Args:
            value: the objective; None: the job is incomplete.
            signalled: this process received a signal, which is ignored if no job is left.
            exit_code: of this process if the job ends it.
        """
        if value is not None:
            self.done.append(directory)
            is_last = self.planned <= len(self.done) + len(self.failed)
            if not signalled or not self.launcher or is_last:
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
        failed = self.failed
        if self.uses_external_launcher and failed:
            exit_process(f"job error: {failed[0]}", FAILURE)
        if self.uses_external_launcher:
            exit_process(None, 0)
        count = len(self.done) + len(failed)
        already = self.n_done_before
        log.info("sweep: %d jobs, %d already complete, %d failed", count, already, len(failed))
        if not failed:
            return
        which = "; ".join(failed)
        summary = JobError(
            f"{len(failed)} of {count} failed: {which}; rerun the same command to retry"
        )
        if self.exit_code == FAILURE:
            exit_process(str(summary), FAILURE)
        ProcessExit().user_error(summary)


class Preflight(Callback):
    """Hydra's callback that checks a run or a sweep before anything is written."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with _exit_on_error():
            check_hydra_keys(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # so that Hydra's shuffle() has the same order on every rank and at every start
        random.seed(0)
        with _exit_on_error():
            check_hydra_keys(config)
            _start(config, read_env(), Sweep.current())


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit on an exception, which Hydra would only log as a warning."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError):
            error = ConfigError(hydra_utils.explain(error))
        ProcessExit().user_error(error)


def _start(config: DictConfig, env: DistEnv, sweep: Sweep) -> None:
    """Check the sweep, adapt Hydra's configuration, and lock the directory.

    Raises:
        UserError: the sweep cannot run.
    """
    overrides = parse_overrides(config)
    jobs = check_jobs(config.hydra, overrides, env)
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
    grid = math.prod(len(expand(override)) for override in overrides)
    sweep.planned = OmegaConf.select(config, "hydra.sweeper.n_trials") or grid
    if first.run.name is not None:
        sweep.lock = env.call_on_rank_zero(lambda: acquire_lock(sweep.directory))
    # Hydra composes all of them first
    log.info("a sweep of %d jobs, in %s", sweep.planned, sweep.directory)
    objective = objective_of(loss_unit(flatten(job.to_dict())) for job in jobs)
    with read_write(config), open_dict(config):
        for_jobs = config.hydra.overrides.hydra
        if objective is not LOSS:
            log.info("the objective is %s: %s", objective.title, WHY_BITS_PER_BYTE)
            for_jobs.append(f"+{hydra_utils.OBJECTIVE_KEY}={objective.metric}")
        for_jobs.append(f"hydra.job.config.override_dirname.exclude_keys={_constant(overrides)}")
        config.hydra.sweep.dir = str(sweep.directory)
        if search.is_search(config):
            search.start_search(config, env)


def _constant(overrides: list[Override]) -> str:
    """Return the keys that do not vary, as a list for Hydra."""
    keys = []
    for override in overrides:
        if not override.is_sweep_override():
            keys.append(repr(hydra_utils.key_of(str(override.input_line))))
    return f"[{','.join(keys)}]"
