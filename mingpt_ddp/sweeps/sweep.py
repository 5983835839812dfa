"""The state of a sweep: the results of its checks, and the jobs that have ended since."""

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

# The record of a job: its run.name, its objective if it is complete, and the reason if it has
# failed for good.
Known = tuple[str, float | None, str | None]
RunOnRankZero = Callable[[Callable[[], Known]], Known]


@dataclass(kw_only=True)
class Sweep:
    """The sweep whose jobs this process runs or launches.

    A single run, or a job that an external launcher has sent here, is a sweep with no job planned.
    """

    env: DistEnv = field(default_factory=DistEnv)
    config: Config | None = None  # configuration of the first job, with the settings of the sweep
    directory: Path = Path()  # the sweep's own directory, or run.root
    planned: int = 0  # number of jobs
    is_remote: bool = False  # other processes run the jobs, count them and log their errors
    lock: IO[str] | None = None  # on `directory`, if it is the sweep's own
    source: Source | None = None  # None if another sweeper of Hydra's chooses the jobs
    # One slot for each concurrent job. Empty if jobs run one after another.
    slots: list[Slot] = field(default_factory=list)
    file: SweepFile = field(default_factory=lambda: SweepFile(None))
    done: dict[int, Path] = field(default_factory=dict)  # directories of ended jobs, by number
    n_done_before: int = 0  # how many jobs of `done` an earlier start completed
    failed: dict[int, str] = field(default_factory=dict)  # labels of failed jobs, by number
    exit_code: int = 0
    _names: dict[int, str] = field(default_factory=dict)  # names of job directories, by number

    @staticmethod
    def current() -> "Sweep":
        """Return the sweep that this process has started, or the sweep of a single run."""
        return _current.get(_ALONE)

    @cached_property
    def kept(self) -> KeptResults:
        """Checks the results of complete jobs, on rank zero."""
        return KeptResults()

    def begin(self) -> None:
        """Make this the current sweep, because Hydra does not pass it to the jobs."""
        _current.set(self)

    @property
    def settings(self) -> SweepConfig:
        """The keys of `sweep`. A single run has their defaults."""
        return SweepConfig() if self.config is None else self.config.sweep

    @property
    def study(self) -> "Study | None":
        """The study of a search, on rank zero. None for a grid, and on other ranks."""
        return None if self.source is None else self.source.study

    @property
    def is_over(self) -> bool:
        """True if all jobs have ended."""
        return self.planned <= len(self.done) + len(self.failed)

    @property
    def has_too_many_failures(self) -> bool:
        """True if more jobs have failed than sweep.max_failures. Then no other job starts."""
        most = self.settings.max_failures
        return most is not None and len(self.failed) > most

    @property
    def directories(self) -> list[Path]:
        """The directories to report: the sweep's own, or the directories of its complete jobs."""
        if self.lock:
            return [self.directory]
        return list(dict.fromkeys(self.done.values()))

    def jobs_left(self, source: Source) -> Iterator[int]:
        """Yield the numbers of the jobs to run. Count the jobs that have already ended for good.

        End early if too many jobs fail.
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
        """Return True if the study says that a trial has ended, and count it.

        With several ranks this is False. They ask rank zero in `start_job`, once the job has its
        process group.
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
        """Yield once for the first attempt of a job, and once for each retry (sweep.retries)."""
        retries = self.settings.retries
        yield
        for retry in range(1, retries + 1):
            if self.study is not None and self.study.has_failed(number):
                return  # attempts of earlier starts count too
            log.warning("job %d: retry %d of %d", number + 1, retry, retries)
            del self.failed[number]  # it has not failed for good
            yield

    def _reason(self, job: Job) -> str:
        """Return the reason for which a job has failed for good."""
        failure = self.file.failure_of(job.label, self._names.get(job.number, ""))
        return "its reason is not recorded" if failure is None else failure.reason

    def start_job(
        self, config: Config, run_on_rank_zero: RunOnRankZero
    ) -> tuple[Config, float | None]:
        """Return the configuration of a job with its run.name, and its objective if it is complete.

        A run outside of a sweep keeps its configuration.

        Raises:
            JobError: An earlier start has recorded that the job failed for good.
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
        """Use as many threads of torch in this process as at the first start of the sweep."""
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
            value: The objective. None if the job is incomplete.
            signalled: True if this process received a signal. It is ignored if no job is left.
            exit_code: Exit code of this process if it exits here.
        """
        if value is not None:
            if self.planned:
                self.record_done(Job.current(), directory)
            if not signalled or self.is_over:
                return value
        self.interrupted(exit_code)

    def interrupted(self, exit_code: int) -> NoReturn:
        """Log how to resume the sweep, and exit."""
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
            RunError: The result lacks the objective of the search, or the study cannot be written.
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
        # Concurrent jobs write to the same console.
        name = f"job {job.number + 1}: " if self.slots else ""
        log.error("%s%s", name, message)
        if self.source is None:
            return
        directory = self._names.get(job.number, "")
        self.file.fail(job.label, directory, message)
        failure = self.file.failure_of(job.label, directory)
        if self.study is not None and failure and failure.count > self.settings.retries:
            self.study.fail(job.number)

    def finish(self) -> None:
        """Print the table and write the page, on rank zero. Exit with an error if jobs failed."""
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
        n_pruned = 0 if self.study is None else self.study.n_pruned
        log.info(
            "sweep: %s, %d already complete, %d failed%s",
            counted(count, "job"),
            self.n_done_before,
            len(self.failed),
            f", {n_pruned} pruned" if n_pruned else "",
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
        """Write the page of the jobs and print their table. Return the error if that fails.

        A closed pipe is not an error, because all jobs are recorded.
        """
        from mingpt_ddp.results.report import PAGE, report

        try:
            with contextlib.suppress(SystemExit):  # from `echo`, if the pipe is closed
                if self.directories and (self.done or self.is_remote):
                    page = self.directory / PAGE
                    metric = self.settings.metric
                    echo(report(self.directories, page, metric, self.kept.accepts))
        except OutputError as error:
            return error
        except RunError as error:  # e.g. no job has written a result that this machine can read
            log.warning("%s", error)
        return None


_ALONE = Sweep()  # for runs that are not jobs of a sweep of this process
_current: ContextVar[Sweep] = ContextVar("sweep")
