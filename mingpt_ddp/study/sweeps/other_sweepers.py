"""Train jobs that a sweeper of another package or an external launcher starts."""

import logging
import time

from mingpt_ddp.config.job import EndsProcess, Job, RunStatus, SweepPlace
from mingpt_ddp.errors import JobError
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv, process_start_time
from mingpt_ddp.process.root_cause import exit_with
from mingpt_ddp.study.sweeps.ended_jobs import JobRecords
from mingpt_ddp.study.sweeps.sweep import Sweep
from mingpt_ddp.training.run_job import run_job

log = logging.getLogger(__name__)


def train_for_other_sweeper(
    job: Job, place: SweepPlace, env: DistEnv, sweep: Sweep | None
) -> float:
    """Train a job that a sweeper of another package or an external launcher starts.

    Args:
        sweep: The sweep if this process runs it. None if an external launcher has started this
            process.

    Raises:
        JobError: The job has failed, and other jobs of the sweep may follow.
        EndsProcess: No other job may follow in this process.
    """
    started_at = process_start_time() if job.number == 0 else time.monotonic()
    outcome = run_job(job, env, sweep or JobRecords(), started_at)
    if sweep is not None:
        outcome = sweep.record(place, outcome)
        if sweep.stopped is not None:
            raise EndsProcess(sweep.finish())
    elif outcome.ends_process or outcome.status is RunStatus.PREEMPTED:
        exit_with(outcome)
    elif outcome.has_failed:
        log.error("%s", outcome.error)
    logs.to_console(env)
    if outcome.value is None:
        raise JobError(f"{place.label} failed")
    return outcome.value
