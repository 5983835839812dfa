"""Run a job in this process or on local workers, and return its outcome."""

import asyncio
import gc
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mingpt_ddp.config.job import Job, Outcome, Reporter, RunStatus, run_name
from mingpt_ddp.distributed.device.machine import threads_per_worker
from mingpt_ddp.distributed.launch.channels import PrunerCallback
from mingpt_ddp.distributed.launch.launcher import Ended, Launch, run_workers
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.distributed.launch.workers import SignalForwarder
from mingpt_ddp.errors import JobError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.root_cause import ProcessExit
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.storage.run_directory import next_free_name, read_result

if TYPE_CHECKING:
    from mingpt_ddp.distributed.group.process_group import ProcessGroup


class JobRecord(NamedTuple):
    """What is known about a job before it runs: its name, and the result of an earlier start.

    Rank zero looks this up, and sends it to the other ranks as JSON values.
    """

    name: str  # final run.name of the job
    value: float | None = None  # objective, by which a sweep ranks the job; None if incomplete
    failure: str | None = None  # why the job has failed for good, if it has
    is_needed: bool = True  # False if the result cannot change a decision of the sweep


class Records(ABC):
    """Gives a job access to the records of its sweep.

    These are the results of earlier starts, the objective, the pruner and the number of threads.
    """

    @abstractmethod
    def look_up(self, job: Job) -> JobRecord:
        """Look up the name of a job, and the result of an earlier start. Called on rank zero.

        Raises:
            ChangedTextError: The text has changed since a job was completed.
        """

    @abstractmethod
    def value_of(self, job: Job) -> float:
        """Return the objective of a complete job, by which a sweep ranks it. Called on rank zero.

        Raises:
            RunError: The job has not measured its objective.
        """

    @abstractmethod
    def pruner_callback(self, job: Job) -> PrunerCallback | None:
        """Return the pruner callback for the evaluations of a job, or None."""

    @abstractmethod
    def threads(self, workers: int, default: int) -> int | None:
        """Return the number of torch threads for each worker, or None to keep the default.

        All starts of a sweep use as many threads as the first one, because the number of threads
        can change the last bits of a result.

        Args:
            workers: The number of workers.
            default: The number of threads if this is the first start of the sweep.
        """


class SingleRun(Records):
    """The records of a job if this process does not run its sweep. Nothing is remembered.

    The job is a single run, or this process is a worker and its parent process runs the sweep.
    """

    def __init__(self, pruner: PrunerCallback | None = None) -> None:
        """
        Args:
            pruner: The pruner callback of a worker, which asks the process that runs the sweep.
        """
        self._pruner = pruner

    def look_up(self, job: Job) -> JobRecord:
        return JobRecord(run_name(job.config))

    def value_of(self, job: Job) -> float:
        loss = read_result(job.directory).get("val_loss")
        return math.nan if loss is None else float(loss)

    def pruner_callback(self, job: Job) -> PrunerCallback | None:
        return self._pruner

    def threads(self, workers: int, default: int) -> int | None:
        return None


def run_job(job: Job, env: DistEnv, records: Records, started_at: float) -> Outcome:
    """Run a job until it ends or a signal comes. An error becomes an outcome, too.

    Args:
        job: The job to run.
        env: The rank of this process, and how it was started.
        records: Results of earlier starts, and the pruner of a search.
        started_at: time.monotonic() when this job began.
    """
    if not runs_on_workers(job, env):
        return _run_here(job, env, records, started_at)
    try:
        ready = name_job(job, env, records)
        if isinstance(ready, Outcome):
            return ready
        forwarder = SignalForwarder()
        with forwarder.installed():
            return asyncio.run(run_on_workers(ready, env, records, started_at, forwarder))
    except Exception as error:
        return outcome_of(error, ProcessExit(job.number), job)


def outcome_of(error: Exception, exits: ProcessExit, job: Job) -> Outcome:
    """Report an error to the other ranks, and return the outcome of the job."""
    outcome = exits.outcome_of(error, in_sweep=job.place is not None)
    if outcome.error is not None:
        # The traceback would keep the model in memory.
        outcome.error.__context__ = outcome.error.__cause__ = None
        outcome.error.with_traceback(None)
    return replace(outcome, directory=job.directory)


def runs_on_workers(job: Job, env: DistEnv) -> bool:
    """Return True if a job needs local workers that this process starts."""
    return bool(job.config.ddp.nproc_per_node) and not env.has_local_rank


def name_job(job: Job, env: DistEnv, records: Records) -> Job | Outcome:
    """Give a job for local workers its final run.name. If its outcome is known, return that."""
    known = records.look_up(job)
    job = job.with_run(name=known.name)
    if outcome := _known_outcome(job, known):
        return outcome
    if job.config.run.resume == "never" and env.is_standalone:
        # Choose the directory here, so that all restarts of the workers share it.
        job = job.with_run(name=next_free_name(job), resume="auto")
    return job


def _known_outcome(job: Job, known: JobRecord) -> Outcome | None:
    """Return the outcome of a job that has ended before or is not needed. Else return None."""
    if not known.is_needed:
        return Outcome(RunStatus.COMPLETE, value=math.nan, recorded_earlier=True, was_needed=False)
    if known.value is not None:
        return Outcome(
            RunStatus.COMPLETE, directory=job.directory, value=known.value, recorded_earlier=True
        )
    if known.failure is not None:
        error = JobError(f"this job has failed before: {known.failure}")
        return Outcome(
            RunStatus.FAILED, directory=job.directory, error=error, recorded_earlier=True
        )
    return None


async def run_on_workers(
    job: Job,
    env: DistEnv,
    records: Records,
    started_at: float,
    forwarder: SignalForwarder,
    slot: Slot | None = None,
) -> Outcome:
    """Run a job on local workers.

    Args:
        job: A job that `name_job` has returned.
        env: The rank of this process, and how it was started.
        records: Results of earlier starts, and the pruner of a search.
        started_at: time.monotonic() when this job began.
        forwarder: Sends signals of this process on to the workers. It is already installed.
        slot: The share of the machine for a concurrent job. None if the job has the whole machine
            and the console.
    """
    workers = job.config.ddp.ranks_here
    default = threads_per_worker(workers, len(slot.cores) if slot else None)
    threads = records.threads(workers, default)
    launch = Launch(job, records.pruner_callback(job), slot, threads)
    ended = await run_workers(launch, env, started_at, forwarder)
    return _outcome_on_workers(job, ended, records)


def _outcome_on_workers(job: Job, ended: Ended, records: Records) -> Outcome:
    preempted_code = job.config.ddp.preempted_exit_code
    directory = job.directory
    if ended.code not in (0, preempted_code) and not ended.signalled:
        error = ended.error or JobError(f"the workers of this job exited with code {ended.code}")
        # Workers print their own error. If they died without printing one, a sweep still prints
        # which of its jobs has failed. A single run prints nothing more.
        reporter = Reporter.NOBODY if ended.error or job.place is None else Reporter.ONE_RANK
        return Outcome(
            RunStatus.FAILED,
            directory=directory,
            error=error,
            exit_code=ended.code,
            reporter=reporter,
        )
    status = read_result(directory).get("status")
    if ended.code != 0 or status not in (RunStatus.COMPLETE, RunStatus.PRUNED):
        return Outcome(
            RunStatus.PREEMPTED, directory=directory, exit_code=ended.code, signalled=True
        )
    value = records.value_of(job)
    return Outcome(RunStatus(status), directory=directory, value=value, signalled=ended.signalled)


def _run_here(job: Job, env: DistEnv, records: Records, started_at: float) -> Outcome:
    """Run a job as one rank, in this process."""
    exits = ProcessExit(job.number)
    signals = SignalHandler(exits)
    signals.install()
    try:
        outcome = _train(job, env, records, started_at, exits, signals)
    except Exception as error:
        outcome = outcome_of(error, exits, job)
    if not outcome.ends_process:
        # The signal handlers outlive the job, and would keep the group in memory.
        exits.group = None
        if outcome.has_failed:
            gc.collect()
    return outcome


def _train(
    job: Job,
    env: DistEnv,
    records: Records,
    started_at: float,
    exits: ProcessExit,
    signals: SignalHandler,
) -> Outcome:
    # The import of torch takes seconds, so it comes after all checks.
    from mingpt_ddp.distributed.runtime import Runtime

    exits.ranks_fail_alike = env.world_size == 1
    runtime = Runtime(job.config, env, job.number)
    group = exits.group = runtime.group
    job, outcome = _agree_on_name(job, group, records)
    if outcome is not None:
        runtime.close()
        return outcome
    if job.place is not None and env.world_size == 1 and not runtime.strategy.is_canonical:
        _use_threads(records)
    from mingpt_ddp.training.run import train_run

    metrics = train_run(job, runtime, signals, started_at, records.pruner_callback(job))
    ended = None
    if metrics is not None:
        ended = group.run_on_rank_zero(lambda: (_status(job), records.value_of(job)))
    # A signal may have come too late to stop this job. The outcome reports it nevertheless.
    signalled = any(group.all_gather(signals.signal_name is not None))
    runtime.close()
    if job.place is not None:
        runtime.free_memory()
    code = job.config.ddp.preempted_exit_code if signalled else 0
    status, value = ended or (RunStatus.PREEMPTED, None)
    directory = job.directory
    return Outcome(
        RunStatus(status), directory=directory, value=value, exit_code=code, signalled=signalled
    )


def _status(job: Job) -> str:
    return str(read_result(job.directory)["status"])


def _agree_on_name(job: Job, group: "ProcessGroup", records: Records) -> tuple[Job, Outcome | None]:
    """Return the job with its final run.name, and its outcome if it has ended before.

    All ranks call this. Rank zero decides, because other nodes may not see its directories.
    """
    known = JobRecord(*group.run_on_rank_zero(lambda: records.look_up(job)))
    job = job.with_run(name=known.name)
    outcome = _known_outcome(job, known)
    if outcome is None and job.config.run.resume == "never":
        free_name = partial(group.get_or_set, "run.name", partial(next_free_name, job))
        job = job.with_run(name=group.run_on_rank_zero(free_name))
    return job, outcome


def _use_threads(records: Records) -> None:
    """Let torch use as many threads as in the first start of the sweep."""
    import torch

    threads = records.threads(1, torch.get_num_threads())
    if threads not in (None, torch.get_num_threads()):
        torch.set_num_threads(threads)
