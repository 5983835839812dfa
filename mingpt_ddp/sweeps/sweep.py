"""A sweep: the state that its jobs share, and the report at its end."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.distributed.env import DistEnv, read_env, report_directories
from mingpt_ddp.distributed.exit import (
    FAILURE,
    ProcessExit,
    echo,
    exit_process,
    signal_exit_code,
)
from mingpt_ddp.distributed.launch.channels import Report
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.errors import JobError, OutputError, RunError, counted
from mingpt_ddp.results.objective import (
    BITS_PER_BYTE,
    LOSS,
    Objective,
)
from mingpt_ddp.storage.run_dir import run_directory, with_run_name
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.jobs import look_up
from mingpt_ddp.sweeps.sources import Source

if TYPE_CHECKING:
    from mingpt_ddp.sweeps.search.trials import Trials

log = logging.getLogger(__name__)

# of a job: its run.name, its objective if it is complete, why it has failed for good
Known = tuple[str, float | None, str | None]
RunOnRankZero = Callable[[Callable[[], Known]], Known]
# Hydra creates the callback and calls jobs without arguments
_current: ContextVar["Sweep"] = ContextVar("sweep")


@dataclass
class Sweep:
    """The state of the sweep whose jobs this process runs or launches.

    Without a launcher, of a single job.
    """

    env: DistEnv = field(default_factory=DistEnv)
    settings: SweepConfig = field(default_factory=SweepConfig)
    directory: Path = Path()  # of all jobs, or run.root
    launcher: str = ""  # the class of Hydra's launcher
    planned: int = 0  # jobs
    lock: IO[str] | None = None  # on `directory`, if it is the sweep's own
    source: Source | None = None  # None: other processes run the jobs
    slots: list[Slot] = field(default_factory=list)  # of jobs that run at a time; []: in turn
    file: SweepFile = field(default_factory=lambda: SweepFile(None))
    limits: dict[str, Any] = field(default_factory=dict)  # of the first job
    done: dict[int, Path] = field(default_factory=dict)  # directories, by number of the job
    n_done_before: int = 0  # of these, completed by an earlier start
    failed: dict[int, str] = field(default_factory=dict)  # labels, by number of the job
    exit_code: int = 0
    _names: dict[str, str] = field(default_factory=dict)  # of directories, by label of the job

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

    @property
    def trials(self) -> "Trials | None":
        """Return what becomes of the trials of a study, on rank zero; None without one."""
        return None if self.source is None else self.source.trials

    def failed_before(self, number: int) -> str | None:
        """Return why a job has failed for good; None if it has not."""
        return None if self.trials is None else self.trials.failed_before(number)

    @property
    def is_over(self) -> bool:
        """Return whether all jobs have ended."""
        return self.planned <= len(self.done) + len(self.failed)

    @property
    def has_too_many_failures(self) -> bool:
        """Return whether no other job starts."""
        most = self.settings.max_failures
        return most is not None and len(self.failed) > most

    def start_job(
        self, config: Config, run_on_rank_zero: RunOnRankZero
    ) -> tuple[Config, float | None]:
        """Return the configuration of a job with its run.name, and its objective if it is complete.

        Outside a sweep return the configuration unchanged.

        Raises:
            JobError: the job has failed before, for good.
        """
        if not hydra_utils.is_multirun():
            return config, None
        job = Job.current()
        objective = self.objective
        swept = hydra_utils.swept_overrides()

        def known() -> Known:
            name, value = look_up(config, swept, objective)
            if self.trials is not None:
                self.trials.match(job.number, run_directory(with_run_name(config, name)))
            return name, value, self.failed_before(job.number)

        name, value, failure = run_on_rank_zero(known)
        config = with_run_name(config, name)
        directory = run_directory(config)
        self._names[job.label] = directory.name
        if value is not None:
            self.n_done_before += directory not in self.done.values()
            self.record_done(job, directory)
            log.info("%s: already complete, %s %.4f", directory, objective.title, value)
        elif failure is not None:
            self.failed[job.number] = job.label
            raise JobError(f"{job.label} has failed before: {failure}")
        else:
            total = f" of {self.planned}" if self.planned else ""
            log.info("job %d%s: %s", job.number + 1, total, job.label)
            if self.trials is not None:
                self.trials.start(job.number)
        return config, value

    def use_threads(self) -> None:
        """Let torch compute in this process with the threads that the sweep began with."""
        if self.source is None or self.env.world_size > 1:
            return
        import torch

        threads = self.file.threads(1, torch.get_num_threads())
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def report_of(self, job: Job) -> Report | None:
        """Return the function that judges the evaluations of a job; None if nothing does."""
        if self.source is None or not self.source.has_study:
            return None
        return partial(self._judge, job.number)

    def _judge(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        assert self.trials is not None  # on rank zero
        return self.trials.report(number, step, metrics)

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
            if self.launcher:
                self.record_done(Job.current(), directory)
            if not signalled or not self.launcher or self.is_over:
                return value
        self.interrupted(exit_code)

    def interrupted(self, exit_code: int) -> NoReturn:
        """Say how to resume, and exit."""
        if self.launcher:
            self.env.call_on_rank_zero(lambda: report_directories(self.directories))
            log.info(
                "sweep: %d of %d jobs done; rerun the same command to resume",
                len(self.done),
                self.planned,
            )
        exit_process(None, signal_exit_code(read_env(), exit_code))

    def record_done(self, job: Job, directory: Path) -> None:
        """Record a complete or pruned job.

        Raises:
            RunError: its result lacks an objective of the search, or the study cannot be written.
        """
        self.env.call_on_rank_zero(lambda: self._keep_done(job, directory))
        self.failed.pop(job.number, None)
        self.done[job.number] = directory

    def _keep_done(self, job: Job, directory: Path) -> None:
        if self.trials is not None:
            self.trials.finish(job.number, directory)
        self.file.succeed(job.label)

    def record_failed(self, job: Job, message: str, code: int) -> JobError:
        """Log the failure of a job on rank zero and return the error to raise."""
        self.failed[job.number] = job.label
        self.exit_code = FAILURE if FAILURE in (self.exit_code, code) else code
        self.env.call_on_rank_zero(lambda: self._keep_failed(job, message))
        return JobError(f"{job.label} failed")

    def _keep_failed(self, job: Job, message: str) -> None:
        name = f"job {job.number + 1}: " if self.slots else ""  # among the lines of others
        log.error("%s%s", name, message)
        if self.source is not None:
            self.file.fail(job.label, self._names.get(job.label), message)
        if self.trials is not None:
            self.trials.fail(job.number, message)

    @property
    def uses_external_launcher(self) -> bool:
        """Return whether other processes run the jobs, count them and log their errors."""
        return bool(self.launcher) and hydra_utils.is_external(self.launcher)

    @property
    def directories(self) -> list[Path]:
        """Return what to report: the sweep's own directory, or those of the complete jobs."""
        if self.lock:
            return [self.directory]
        return list(dict.fromkeys(self.done.values()))

    def finish(self) -> None:
        """On rank zero, print the table, write the page and exit with an error if jobs failed."""
        if self.launcher:
            self.env.call_on_rank_zero(self._report)

    def _print_table(self) -> OutputError | None:
        """Write the page of the jobs and print their table; return why it cannot be printed.

        The jobs are recorded: a table that nobody reads is no error, and changes no exit code.
        """
        from mingpt_ddp.results.report import PAGE, report

        try:
            with contextlib.suppress(SystemExit):  # of a closed pipe
                if self.directories and (self.done or self.uses_external_launcher):
                    echo(report(self.directories, self.directory / PAGE))
        except OutputError as error:
            return error
        except RunError as error:  # e.g. no job has written a result that this machine can read
            log.warning("%s", error)
        return None

    def _report(self) -> None:
        report_directories(self.directories)
        unwritten = self._print_table()
        failed = [*self.failed.values()]
        if self.uses_external_launcher and failed:
            exit_process(JobError(failed[0]), FAILURE)
        if self.uses_external_launcher:
            if unwritten is not None:
                ProcessExit().user_error(unwritten)
            exit_process(None, 0)
        count = len(self.done) + len(failed)
        jobs = counted(count, "job")
        log.info("sweep: %s, %d already complete, %d failed", jobs, self.n_done_before, len(failed))
        if unwritten is not None and not failed:
            ProcessExit().user_error(unwritten)
        if unwritten is not None:
            log.error("%s", unwritten)
        if not failed:
            return
        which = "; ".join(dict.fromkeys(failed))
        again = "rerun the same command to retry"
        if self.trials is not None:
            again = "raise sweep.retries to retry"
        if count < self.planned:
            again = f"{self.planned - count} have not started; raise sweep.max_failures, or {again}"
        summary = JobError(f"{len(failed)} of {count} failed: {which}; {again}")
        if self.exit_code == FAILURE:
            exit_process(summary, FAILURE)
        ProcessExit().user_error(summary)
