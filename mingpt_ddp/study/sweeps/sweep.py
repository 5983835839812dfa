"""The state of a sweep: its checked settings, and how each of its jobs has ended."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import Job, Outcome, Reporter, RunStatus, SweepPlace
from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.distributed.launch.channels import PrunerCallback
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.errors import ConfigError, JobError, OutputError, RunError, counted
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.exit import FAILURE, USER_ERROR
from mingpt_ddp.process.root_cause import failed
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.storage.run_directory import refuse_other_loop
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.sweeps.ended_jobs import JobRecords
from mingpt_ddp.study.sweeps.sources import Source
from mingpt_ddp.study.sweeps.until_decided import NeededJobs
from mingpt_ddp.training.run_job import JobRecord, Records

if TYPE_CHECKING:
    from mingpt_ddp.study.sweeps.search.study import Study

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Sweep(Records):
    """A sweep whose jobs this process runs or launches."""

    env: DistEnv
    config: Config  # configuration of the first job, with the settings of the sweep
    directory: Path  # the sweep's own directory, or run.root if it has none
    n_jobs: int  # 0 if only a sweeper of another package knows the number
    # True if an external launcher runs the jobs. Its processes log the errors of the jobs.
    is_remote: bool = False
    lock: IO[str] | None = None  # lock of the sweep's own directory; None if it has none
    script: Path | None = None  # user's script whose loop trains the jobs; None for main.py
    source: Source | None = None  # None if a sweeper of another package chooses the jobs
    # One slot (a share of the machine) for each concurrent job. Empty if jobs run in turn.
    slots: list[Slot] = field(default_factory=list)
    job_records: JobRecords = field(default_factory=JobRecords)
    file: SweepFile = field(default_factory=lambda: SweepFile(None))
    done: dict[int, Path] = field(default_factory=dict)  # directories of ended jobs, by number
    n_done_before: int = 0  # number of jobs in `done` that an earlier start has completed
    failed: dict[int, str] = field(default_factory=dict)  # labels of failed jobs, by number
    # Outcome of the last failed attempt of each job, by the number of the job.
    last_failures: dict[int, Outcome] = field(default_factory=dict)
    # Decides which jobs are still needed with sweep.until=decided. None if the sweep needs all of
    # its jobs, and on all ranks except rank zero.
    needed_jobs: NeededJobs | None = None
    not_needed: set[int] = field(default_factory=set)  # numbers of jobs that need not run
    # Outcome after which no other job starts. None while the sweep goes on.
    stopped: Outcome | None = None

    @property
    def settings(self) -> SweepConfig:
        """The keys of the group `sweep`."""
        return self.config.sweep

    @property
    def study(self) -> "Study | None":
        """The study of a search, on rank zero. None for a grid, and on all other ranks."""
        return None if self.source is None else self.source.study

    @property
    def is_over(self) -> bool:
        """True if no job is left. Always False if `n_jobs` is not known."""
        # Ranks in lock-step must agree, but only rank zero knows which jobs are needed.
        needed = self.needed_jobs if self.env.world_size == 1 else None
        if needed is not None and needed.n_needed_settings(self.failed) == 0:
            return True
        return 0 < self.n_jobs <= len({*self.done, *self.failed, *self.not_needed})

    @property
    def has_too_many_failures(self) -> bool:
        """True if more than sweep.max_failures jobs have failed. Then no other job starts."""
        most = self.settings.max_failures
        return most is not None and len(self.failed) > most

    @property
    def directories(self) -> list[Path]:
        """The directories to report: the sweep's own, or else one for each complete job."""
        if self.lock:
            return [self.directory]
        return list(dict.fromkeys(self.done.values()))

    def jobs_left(self, source: Source) -> Iterator[int]:
        """Yield the numbers of the jobs to run. Record the jobs that have already ended for good.

        Stop early after a signal, or if too many jobs have failed.
        """
        for number in range(self.n_jobs):
            if self.stopped is not None:
                return
            if self.has_too_many_failures:
                log.warning(
                    "no other job starts, because %s failed (sweep.max_failures=%d)",
                    counted(len(self.failed), "job"),
                    self.settings.max_failures,
                )
                return
            if not self._has_ended(number, source):
                yield number

    def _has_ended(self, number: int, source: Source) -> bool:
        """Return True if a job is not needed or its trial has ended, and record that.

        With several ranks, always return False. They ask rank zero in `look_up`, once the job has
        its process group.
        """
        if self.env.world_size > 1:
            return False
        if self.needed_jobs is not None and not self._is_needed(number):
            self._count_not_needed(number, self.needed_jobs)
            return True
        if self.study is None:
            return False
        directory = self.study.directory_of(number)
        if directory is not None:
            self.job_records.kept_results.check(directory, self.config)
            self.done[number] = directory
            self.n_done_before += 1
            log.info("%s: already complete", directory)
            return True
        if not self.study.has_failed(number):
            return False
        place = source.place(number)
        self.failed[number] = place.label
        log.info("%s has failed before: %s", place.label, self._reason(place.label, ""))
        return True

    def _count_not_needed(self, number: int, needed_jobs: NeededJobs) -> None:
        """Record a job that is not needed. If an earlier start has trained it, it is complete."""
        directory = needed_jobs.directory_of(number)
        if directory is None:
            self.not_needed.add(number)
            return
        self.job_records.kept_results.check(directory, self.config)
        self.done[number] = directory
        self.n_done_before += 1

    def _is_needed(self, number: int) -> bool:
        """Return True if a job has to run. sweep.until=decided may not need all jobs."""
        return self.needed_jobs is None or self.needed_jobs.is_needed(number, self.failed)

    def attempts(self, number: int) -> Iterator[None]:
        """Yield once for the first attempt of a job, and once for each retry (sweep.retries)."""
        retries = self.settings.retries
        yield
        for retry in range(1, retries + 1):
            if self.study is not None and self.study.has_failed(number):
                return  # attempts in earlier starts of the sweep count too
            log.warning("job %d: retry %d of %d", number + 1, retry, retries)
            del self.failed[number]  # the job has not failed for good
            yield

    def _reason(self, label: str, directory: str) -> str:
        """Return the reason why a job has failed for good."""
        failure = self.file.failure_of(label, directory)
        return "the reason is not recorded" if failure is None else failure.reason

    @property
    def batch_size(self) -> int:
        """Number of jobs that an external launcher runs together."""
        if self.needed_jobs is not None:
            return max(1, self.needed_jobs.n_needed_settings(self.failed))
        return int(self.settings.parallel)

    def look_up(self, job: Job) -> JobRecord:
        """Return earlier results of a job. If there are none, log that the job starts."""
        assert job.place is not None
        number = job.number
        known = self.job_records.look_up(job)
        refuse_other_loop(job.with_run(name=known.name).directory, self.script)
        if self.study is not None and self.study.has_failed(number):
            known = known._replace(failure=self._reason(job.place.label, PurePath(known.name).name))
        if known.value is None and not self._is_needed(number):
            return known._replace(is_needed=False)
        if known.value is None and known.failure is None:
            total = f" of {self.n_jobs}" if self.n_jobs else ""
            log.info("job %d%s: %s", number + 1, total, job.place.label)
        return known

    def value_of(self, job: Job) -> float:
        return self.job_records.value_of(job)

    def threads(self, workers: int, default: int) -> int | None:
        """Return the number of threads of each worker, as at the first start of the sweep.

        Return None for ranks of torchrun, which do not change their number of threads.
        """
        if self.source is None or self.env.world_size > 1:
            return None
        return self.file.threads(workers, default)

    def pruner_callback(self, job: Job) -> PrunerCallback | None:
        """Return the pruner callback for a job, or None outside of a search."""
        if self.source is None or not self.settings.is_search:
            return None
        return partial(self._ask_pruner, job.number)

    def _ask_pruner(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        assert self.study is not None  # on rank zero
        name = objective_named(self.settings.metric).key.removeprefix("val_")
        return self.study.report(number, step, metrics[name]) if name in metrics else None

    def record(self, place: SweepPlace, outcome: Outcome) -> Outcome:
        """Record how a job has ended. Set `stopped` if no other job may start.

        Returns:
            The same outcome, or a failed outcome if the result lacks the objective of the search
            or the study cannot be written.
        """
        try:
            self._record(place, outcome)
        except RunError as error:
            outcome = failed(error)
            self._record(place, outcome)
        return outcome

    def _record(self, place: SweepPlace, outcome: Outcome) -> None:
        if not outcome.was_needed:
            self.not_needed.add(place.number)
            return
        if outcome.has_failed:
            self._record_failed(place, outcome)
        elif outcome.status is not RunStatus.PREEMPTED and outcome.directory is not None:
            if outcome.recorded_earlier:
                self.n_done_before += outcome.directory not in self.done.values()
                title = objective_named(self.settings.metric).title
                log.info("%s: already complete, %s %.4f", outcome.directory, title, outcome.value)
            self.record_done(place, outcome.directory)
        must_stop = outcome.signalled or outcome.status is RunStatus.PREEMPTED
        if outcome.ends_process or (must_stop and not self.is_over):
            self.stopped = outcome

    def record_done(self, place: SweepPlace, directory: Path) -> None:
        """Record a complete or pruned job.

        Raises:
            RunError: The result lacks the objective of the search, or the study cannot be written.
        """
        self.env.call_on_rank_zero(lambda: self._keep_done(place, directory))
        self.failed.pop(place.number, None)
        self.done[place.number] = directory

    def _keep_done(self, place: SweepPlace, directory: Path) -> None:
        self.file.succeed(place.label, directory.name)
        if self.study is not None:
            self.study.end(place.number, directory)
        if self.needed_jobs is not None:
            self.needed_jobs.add(place.number, directory)

    def _record_failed(self, place: SweepPlace, outcome: Outcome) -> None:
        self.failed[place.number] = place.label
        if outcome.ends_process:  # this process prints the error as its last line
            return
        if outcome.recorded_earlier:
            log.info("%s: %s", place.label, outcome.error)
            return
        self.last_failures[place.number] = outcome
        self.env.call_on_rank_zero(lambda: self._keep_failed(place, outcome))

    def _keep_failed(self, place: SweepPlace, outcome: Outcome) -> None:
        message = str(outcome.error)
        if self.slots:  # concurrent jobs write to the same console
            log.error("job %d: %s", place.number + 1, message)
        elif outcome.reporter is not Reporter.NOBODY:
            log.error("%s", message)
        if self.source is None:
            return
        directory = outcome.directory.name if outcome.directory else ""
        self.file.fail(place.label, directory, message)
        failure = self.file.failure_of(place.label, directory)
        if self.study is not None and failure and failure.count > self.settings.retries:
            self.study.fail(place.number)

    def finish(self) -> Outcome:
        """Print the table of results and write the report page. Return the outcome of the sweep.

        Only rank zero prints and writes.
        """
        return replace(
            self._outcome(), directories=tuple(self.directories), metric=self.settings.metric
        )

    def _outcome(self) -> Outcome:
        if self.stopped is not None and self.stopped.has_failed:
            return self.stopped
        if self.stopped is not None:
            total = f" of {self.n_jobs}" if self.n_jobs else ""
            log.info(
                "sweep: %d%s jobs done; rerun the same command to resume", len(self.done), total
            )
            return replace(self.stopped, status=RunStatus.PREEMPTED)
        complete = Outcome(RunStatus.COMPLETE)
        return self.env.call_on_rank_zero(self._finish) or complete

    def _finish(self) -> Outcome:
        output_error = self._print_table()
        if self.is_remote:
            if self.failed:
                return failed(JobError(next(iter(self.failed.values()))), FAILURE)
            return Outcome(RunStatus.COMPLETE) if output_error is None else failed(output_error)
        n_ended = len(self.done) + len(self.failed)
        n_not_needed = len(self.not_needed)
        n_pruned = 0 if self.study is None else self.study.n_pruned
        log.info(
            "sweep: %s, %d already complete, %d failed%s%s",
            counted(n_ended, "job"),
            self.n_done_before,
            len(self.failed),
            f", {n_pruned} pruned" if n_pruned else "",
            f", {n_not_needed} not needed" if n_not_needed else "",
        )
        if not self.failed:
            return Outcome(RunStatus.COMPLETE) if output_error is None else failed(output_error)
        if output_error is not None:
            log.error("%s", output_error)
        outcomes = [self.last_failures[n] for n in self.failed if n in self.last_failures]
        advice = self._advice(outcomes)
        if (left := self.n_jobs - n_ended - n_not_needed) > 0:
            advice = f"{counted(left, 'job')} did not start; raise sweep.max_failures, or {advice}"
        labels = "; ".join(dict.fromkeys(self.failed.values()))
        error = JobError(
            f"{len(self.failed)} of {counted(n_ended, 'job')} failed: {labels}; {advice}"
        )
        has_crashed = any(outcome.exit_code == FAILURE for outcome in outcomes)
        return failed(error, FAILURE if has_crashed else USER_ERROR)

    def _advice(self, outcomes: list[Outcome]) -> str:
        """Advise the user about the failed jobs. A retry does not help after a config error.

        Args:
            outcomes: Outcomes of the failed jobs that this process has run.
        """
        if self.study is not None:
            return "failed trials do not start again; raise sweep.trials to try other values"
        n_invalid = sum(isinstance(outcome.error, ConfigError) for outcome in outcomes)
        if n_invalid == 0:
            return "rerun the same command to retry"
        if n_invalid == len(self.failed):
            return "correct the settings of the failed jobs"
        return "rerun the same command to retry; a job with a config error needs other settings"

    def _print_table(self) -> OutputError | None:
        """Write the report page and print the table. Return the error if the output fails.

        A closed pipe does not count as an error, because all jobs are recorded.
        """
        from mingpt_ddp.study.results.report import PAGE, report

        try:
            with contextlib.suppress(SystemExit):  # from `echo`, if the pipe is closed
                if self.directories and (self.done or self.is_remote):
                    page = self.directory / PAGE
                    metric = self.settings.metric
                    echo(report(self.directories, page, metric, self.config.run.accept_code))
        except OutputError as error:
            return error
        except RunError as error:  # for instance, this machine cannot read the results of the jobs
            log.warning("%s", error)
        return None
