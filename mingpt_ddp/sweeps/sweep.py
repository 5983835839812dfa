"""A sweep: what its checks have determined, and which of its jobs have ended since."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

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
from mingpt_ddp.distributed.launch.channels import Judge
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.errors import DataError, JobError, OutputError, RunError, counted
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.storage.run_directory import with_run_name
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.sweeps.job import Job, look_up
from mingpt_ddp.sweeps.kept_results import KeptResults
from mingpt_ddp.sweeps.sources import Source

if TYPE_CHECKING:
    from mingpt_ddp.sweeps.search.study import Study

log = logging.getLogger(__name__)

# What a job leaves: its run.name, its objective if it is complete, why it has failed for good.
Known = tuple[str, float | None, str | None]
RunOnRankZero = Callable[[Callable[[], Known]], Known]


@dataclass(kw_only=True)
class Sweep:
    """The sweep whose jobs this process runs or launches.

    With no job planned, of a run alone, or of a job that an external launcher has sent.
    """

    env: DistEnv = field(default_factory=DistEnv)
    config: Config | None = None  # of the first job, with the settings of the sweep
    directory: Path = Path()  # of all jobs, or run.root
    planned: int = 0  # number of jobs
    is_remote: bool = False  # other processes run the jobs, count them and log their errors
    lock: IO[str] | None = None  # on `directory`, if it is the sweep's own
    source: Source | None = None  # None: another sweeper of Hydra's says what the jobs are
    slots: list[Slot] = field(default_factory=list)  # of jobs that run at a time; []: in turn
    file: SweepFile = field(default_factory=lambda: SweepFile(None))
    done: dict[int, Path] = field(default_factory=dict)  # directories, by number of the job
    n_done_before: int = 0  # of these, completed by an earlier start
    failed: dict[int, str] = field(default_factory=dict)  # labels, by number of the job
    exit_code: int = 0
    _names: dict[int, str] = field(default_factory=dict)  # of directories, by number of the job

    @staticmethod
    def current() -> "Sweep":
        """Return the sweep that this process has started, or that of a run alone."""
        return _current.get(_ALONE)

    @cached_property
    def kept(self) -> KeptResults:
        """The checks of complete jobs, on rank zero."""
        return KeptResults()

    def begin(self) -> None:
        """Make this the current sweep: Hydra creates its callback and calls jobs without it."""
        _current.set(self)

    @property
    def settings(self) -> SweepConfig:
        """The keys of `sweep`, with their defaults for a run alone."""
        return SweepConfig() if self.config is None else self.config.sweep

    @property
    def study(self) -> "Study | None":
        """The study of a search, on rank zero; None of a grid, and on the other ranks."""
        return None if self.source is None else self.source.study

    @property
    def is_over(self) -> bool:
        """Return whether all jobs have ended."""
        return self.planned <= len(self.done) + len(self.failed)

    @property
    def has_too_many_failures(self) -> bool:
        """Return whether no other job starts."""
        most = self.settings.max_failures
        return most is not None and len(self.failed) > most

    @property
    def directories(self) -> list[Path]:
        """Return what to report: the sweep's own directory, or those of the complete jobs."""
        if self.lock:
            return [self.directory]
        return list(dict.fromkeys(self.done.values()))

    def jobs_left(self, source: Source) -> Iterator[int]:
        """Yield the numbers of the jobs to run; count those that have ended for good.

        Stop after too many failures.
        """
        for number in range(self.planned):
            if self.has_too_many_failures:
                log.warning(
                    "no other job starts: %d failed, sweep.max_failures=%d",
                    len(self.failed),
                    self.settings.max_failures,
                )
                return
            if not self._has_ended(number, source):
                yield number

    def _has_ended(self, number: int, source: Source) -> bool:
        """Count a trial that has ended, as its study says; return True if it has.

        Ranks in lock-step ask rank zero once the job has its process group, in `start_job`.
        """
        if self.study is None or self.config is None or self.env.world_size > 1:
            return False
        directory = self.study.directory_of(number)
        if directory is not None:
            self.kept.check(directory, self.config)
            self.done[number] = directory
            self.n_done_before += 1
            log.info("%s: already complete", directory)
            return True
        if not self.study.has_failed(number):
            return False
        job = source.job(number)
        self.failed[number] = job.label
        log.info("%s has failed before: %s", job.label, self._reason(job))
        return True

    def attempts(self, number: int) -> Iterator[None]:
        """Yield for each time that a job may start, the first and `sweep.retries`."""
        retries = self.settings.retries
        yield
        for retry in range(1, retries + 1):
            if self.study is not None and self.study.has_failed(number):
                return  # as often, with earlier starts
            log.warning("job %d: retry %d of %d", number + 1, retry, retries)
            del self.failed[number]  # it has not failed for good
            yield

    def _reason(self, job: Job) -> str:
        """Return why a job has failed for good."""
        failure = self.file.failure_of(job.label, self._names.get(job.number, ""))
        return "its reason is not recorded" if failure is None else failure.reason

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
        objective = objective_named(config.sweep.metric)
        swept = hydra_utils.swept_overrides()

        def known() -> Known:
            name, value = look_up(config, swept, objective)
            directory = Path(config.run.root, name)
            self._names[job.number] = directory.name
            if value is not None:
                self.kept.check(directory, config)
            has_failed = self.study is not None and self.study.has_failed(job.number)
            return name, value, self._reason(job) if has_failed else None

        try:
            name, value, failure = run_on_rank_zero(known)
        except DataError as error:
            # The text has changed. No other job would compare, so the sweep ends.
            ProcessExit().user_error(error)
        config = with_run_name(config, name)
        directory = Path(config.run.root, name)
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
        return config, value

    def use_threads(self) -> None:
        """Let torch compute in this process with the threads that the sweep began with."""
        if self.source is None or self.env.world_size > 1:
            return
        import torch

        threads = self.file.threads(1, torch.get_num_threads())
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def report_of(self, job: Job) -> Judge | None:
        """Return the function that judges the evaluations of a job; None if nothing does."""
        if self.source is None or not self.settings.is_search:
            return None
        return partial(self._judge, job.number)

    def _judge(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        assert self.study is not None  # on rank zero
        name = objective_named(self.settings.metric).series.removeprefix("val_")
        return self.study.report(number, step, metrics[name]) if name in metrics else None

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
            if self.planned:
                self.record_done(Job.current(), directory)
            if not signalled or self.is_over:
                return value
        self.interrupted(exit_code)

    def interrupted(self, exit_code: int) -> NoReturn:
        """Say how to resume, and exit."""
        if self.planned:
            self.env.call_on_rank_zero(
                lambda: report_directories(self.directories, self.settings.metric)
            )
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
        self.file.succeed(job.label, directory.name)
        if self.study is not None:
            self.study.end(job.number, directory)

    def record_failed(self, job: Job, message: str, code: int) -> JobError:
        """Log the failure of a job on rank zero and return the error to raise."""
        self.failed[job.number] = job.label
        self.exit_code = FAILURE if FAILURE in (self.exit_code, code) else code
        self.env.call_on_rank_zero(lambda: self._keep_failed(job, message))
        return JobError(f"{job.label} failed")

    def _keep_failed(self, job: Job, message: str) -> None:
        name = f"job {job.number + 1}: " if self.slots else ""  # among the lines of others
        log.error("%s%s", name, message)
        if self.source is None:
            return
        directory = self._names.get(job.number, "")
        self.file.fail(job.label, directory, message)
        failure = self.file.failure_of(job.label, directory)
        if self.study is not None and failure and failure.count > self.settings.retries:
            self.study.fail(job.number)

    def finish(self) -> None:
        """On rank zero, print the table, write the page and exit with an error if jobs failed."""
        if self.planned:
            self.env.call_on_rank_zero(self._finish)

    def _finish(self) -> None:
        report_directories(self.directories, self.settings.metric)
        unwritten = self._print_table()
        if self.is_remote:
            if self.failed:
                exit_process(JobError(next(iter(self.failed.values()))), FAILURE)
            if unwritten is not None:
                ProcessExit().user_error(unwritten)
            exit_process(None, 0)
        count = len(self.done) + len(self.failed)
        log.info(
            "sweep: %s, %d already complete, %d failed",
            counted(count, "job"),
            self.n_done_before,
            len(self.failed),
        )
        if unwritten is not None and not self.failed:
            ProcessExit().user_error(unwritten)
        if unwritten is not None:
            log.error("%s", unwritten)
        if not self.failed:
            return
        again = "rerun the same command to retry"
        if self.study is not None:
            again = "they do not start again; raise sweep.trials for other values"
        if count < self.planned:
            left = self.planned - count
            again = f"{left} have not started; raise sweep.max_failures, or {again}"
        which = "; ".join(dict.fromkeys(self.failed.values()))
        summary = JobError(f"{len(self.failed)} of {count} failed: {which}; {again}")
        if self.exit_code == FAILURE:
            exit_process(summary, FAILURE)
        ProcessExit().user_error(summary)

    def _print_table(self) -> OutputError | None:
        """Write the page of the jobs and print their table; return why it cannot be printed.

        The jobs are recorded: a table that nobody reads is no error, and changes no exit code.
        """
        from mingpt_ddp.results.report import PAGE, report

        try:
            with contextlib.suppress(SystemExit):  # of a closed pipe
                if self.directories and (self.done or self.is_remote):
                    page = self.directory / PAGE
                    metric = self.settings.metric
                    echo(report(self.directories, page, metric, self.kept.accepts))
        except OutputError as error:
            return error
        except RunError as error:  # e.g. no job has written a result that this machine can read
            log.warning("%s", error)
        return None


_ALONE = Sweep()  # of a run that is no job of this process
_current: ContextVar[Sweep] = ContextVar("sweep")
