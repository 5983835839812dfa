"""A run on local workers, of a sweep or alone: what starts it, and what its end means."""

import time
from dataclasses import dataclass, replace

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mingpt_ddp.config import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import exit_process
from mingpt_ddp.distributed.launcher import Ended, Launch
from mingpt_ddp.distributed.machine import threads_per_worker
from mingpt_ddp.distributed.slots import Slot, visible_gpus
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.trackers.outboxes import check_installed
from mingpt_ddp.storage.run_dir import (
    RunStatus,
    next_free_name,
    read_result,
    run_directory,
    with_run_name,
)
from mingpt_ddp.storage.urls import check_url
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.sweep import Sweep
from mingpt_ddp.training.notify import FAILED, notify


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
    """Return the run to start, or its objective if it is complete.

    Hydra's state describes it.

    Args:
        slot: of a job of several at a time; None: this machine and console.

    Raises:
        JobError: the job of a sweep has failed for good.
    """
    overrides = hydra_utils.worker_overrides()
    config, known = sweep.start_job(config, lambda work: work())
    if known is not None:
        return known
    if config.run.resume == "never" and env.is_standalone:  # one new directory for all restarts
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
    """Return the objective of a run that has ended; None if it is incomplete, for a signal.

    Raises:
        JobError: the job of a sweep has failed; the sweep has recorded it.
    """
    config = local.launch.config
    preempted = config.ddp.preempted_exit_code
    if ended.code not in (0, preempted) and not ended.signalled:
        local.env.call_on_rank_zero(lambda: notify(config, FAILED))
        if not hydra_utils.is_multirun():
            exit_process(None, ended.code)
        reason = ended.last_line or f"job error: its workers exited with code {ended.code}"
        raise sweep.record_failed(local.job, reason, ended.code)
    result = read_result(local.launch.directory)
    has_ended = result.get("status") in (RunStatus.COMPLETE, RunStatus.PRUNED)
    if ended.code != 0 or not has_ended:
        return None
    return sweep.objective.value(result)


def checked_config(cfg: DictConfig) -> Config:
    """Return the configuration that Hydra has composed, typed, with the number of workers.

    Raises:
        ConfigError, CodeError: a key, a value or a user's file is invalid.
    """
    config = hydra_utils.to_config(cfg, HydraConfig.get(), HydraConfig.get().overrides.task)
    if config.ddp.nproc_per_node == "gpu":
        config = replace(config, ddp=replace(config.ddp, nproc_per_node=_count_gpus()))
    _check_urls(config)
    check_installed(config)
    return config


def _count_gpus() -> int:
    count = len(visible_gpus())
    if count == 0:
        raise ConfigError(
            "ddp.nproc_per_node=gpu, but torch sees no GPU here; give a number of workers"
        )
    return count


def _check_urls(config: Config) -> None:
    """Raise a ConfigError for a URL that no installed library can open."""
    path = getattr(config.data, "path", None)
    if path and not getattr(config.data, "reader", None):
        check_url(path, "data.path")
    if config.snapshot.path:
        check_url(config.snapshot.path, "snapshot.path", writable=True)
    if config.snapshot.fallback_path:
        check_url(config.snapshot.fallback_path, "snapshot.fallback_path", writable=True)
    check_url(config.run.resume, "run.resume")
    if config.run.init_from is not None:
        check_url(config.run.init_from, "run.init_from")
