"""Run a job of a sweep, or a single run, on local workers: prepare it and conclude from its end."""

import time
from dataclasses import dataclass, replace

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.device.machine import threads_per_worker
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import exit_process
from mingpt_ddp.distributed.launch.launcher import Ended, Launch
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.storage.run_directory import (
    RunStatus,
    next_free_name,
    read_result,
    run_directory,
    with_run_name,
)
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.sweep import Sweep


@dataclass(frozen=True)
class LocalJob:
    """A run that is ready to start on local workers."""

    job: Job
    launch: Launch
    env: DistEnv
    started_at: float  # time.monotonic()


def prepare_local(
    config: Config, env: DistEnv, sweep: Sweep, started_at: float | None, slot: Slot | None = None
) -> LocalJob | float:
    """Prepare the run that Hydra's state describes. Return its objective if it is complete.

    Args:
        slot: Slot of a concurrent job. None if the run has the whole machine and the console.

    Raises:
        JobError: The job of a sweep has failed for good.
    """
    overrides = hydra_utils.worker_overrides()
    config, known = sweep.start_job(config, lambda work: work())
    if known is not None:
        return known
    if config.run.resume == "never" and env.is_standalone:  # all restarts share one new directory
        config = with_run_name(config, next_free_name(config))
        overrides.append("run.resume=auto")
    directory = run_directory(config)
    overrides.append(f'run.name="{directory.relative_to(config.run.root).as_posix()}"')
    job = Job.current()
    launch = Launch(config, overrides, directory, sweep.report_of(job), slot)
    if sweep.source is not None:
        cores = len(slot.cores) if slot else None
        default = threads_per_worker(launch.workers, cores)
        launch = replace(launch, threads=sweep.file.threads(launch.workers, default))
    return LocalJob(job, launch, env, started_at or time.monotonic())


def conclude_local(local: LocalJob, ended: Ended, sweep: Sweep) -> float | None:
    """Return the objective of a run that has ended. Return None if a signal interrupted it.

    Raises:
        JobError: The job of a sweep has failed, and the sweep has recorded the failure.
    """
    config = local.launch.config
    directory = local.launch.directory
    preempted = config.ddp.preempted_exit_code
    if ended.code not in (0, preempted) and not ended.signalled:
        if not hydra_utils.is_multirun():
            exit_process(None, ended.code)
        reason = ended.last_line or f"job error: its workers exited with code {ended.code}"
        raise sweep.record_failed(local.job, reason, ended.code)
    result = read_result(directory)
    has_ended = result.get("status") in (RunStatus.COMPLETE, RunStatus.PRUNED)
    if ended.code != 0 or not has_ended:
        return None
    return objective_named(config.sweep.metric).value(result)
