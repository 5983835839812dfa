"""Check a job against this machine, before its process does anything else."""

from dataclasses import replace

from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.launch.slots import visible_gpus
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.metrics.trackers.sending import check_installed
from mingpt_ddp.storage.urls import check_urls


def checked_job(job: Job) -> Job:
    """Check a job, and return it with the number of its workers filled in.

    Raises:
        ConfigError: A URL cannot be opened here, the tracker is not installed, or there is no GPU.
    """
    config = job.config
    if config.ddp.nproc_per_node == "gpu":
        config = replace(config, ddp=replace(config.ddp, nproc_per_node=_count_gpus()))
    check_urls(config)
    check_installed(config.tracker)
    return replace(job, config=config)


def _count_gpus() -> int:
    count = len(visible_gpus())
    if count == 0:
        raise ConfigError(
            "ddp.nproc_per_node=gpu, but torch sees no GPU here; give a number of workers"
        )
    return count
