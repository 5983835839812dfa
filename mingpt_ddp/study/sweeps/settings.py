"""Check the keys of the group `sweep`, and plan the slots of concurrent jobs."""

from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.config.validation import check, hint_at
from mingpt_ddp.distributed.device.machine import (
    MIN_RANK_BYTES,
    check_processes,
    cores,
    count_cores,
)
from mingpt_ddp.distributed.launch.slots import Slot, divide, visible_gpus
from mingpt_ddp.errors import ConfigError, command
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.sweeps.checks import uses_our_sweeper

BITS_METRICS = ("bits_per_byte", "bits_per_char")
# Numbers in result.json by which jobs can be ranked.
RESULT_METRICS = (
    "val_loss",
    "val_accuracy",
    "best_val_loss",
    "train_loss",
    *BITS_METRICS,
    *(f"val_{name}" for name in BITS_METRICS),
    "test_loss",
    "test_accuracy",
    "wall_seconds",
    "parameters",
    "tokens",
    "samples",
    "step",
    "epoch",
    "goodput",
)


def check_settings(config: DictConfig, jobs: list[Config], env: DistEnv) -> SweepConfig:
    """Check the keys of the group `sweep` against each other and the rest of the command.

    Args:
        config: Hydra's configuration of the sweep.
        jobs: The configurations that `check_jobs` has returned. The first job comes first.

    Raises:
        ConfigError: The settings cannot be combined.
    """
    settings = jobs[0].sweep
    check(
        all(job.sweep == settings for job in jobs),
        "sweep.* settings hold for all jobs of a sweep; give each of these keys one value",
    )
    launcher = str(config.hydra.launcher._target_)
    is_remote = hydra_utils.is_external(launcher)
    _check_sweeper(config, settings)
    if settings.is_search:
        _check_search(jobs[0])
    if is_remote:
        _check_remote(settings, launcher.rpartition(".")[2])
    if env.world_size > 1 or not env.is_standalone:
        _check_lock_step(settings)
    check(
        settings.is_search or settings.pruner == "none",
        f"sweep.pruner={settings.pruner} is only for a search: add sweep=optuna, or leave it out",
    )
    check(
        settings.pruner != "none" or not settings.pruner_settings,
        "sweep.pruner_settings is only for a pruner: add sweep.pruner=median, or leave it out",
    )
    _check_metric(jobs[0])
    return settings


def _check_sweeper(config: DictConfig, settings: SweepConfig) -> None:
    """Check that no key needs this package's sweeper while a different sweeper is chosen."""
    check(
        uses_our_sweeper(config)
        or (not settings.is_search and settings.parallel == 1 and settings.until is None),
        "sweep.sampler, sweep.parallel and sweep.until need hydra/sweeper=mingpt_ddp, not "
        f"{config.hydra.sweeper._target_}",
    )


def _check_search(first: Config) -> None:
    """Check that a search can compare its jobs."""
    check(
        first.run.name is not None,
        "a search keeps its jobs in one directory; give the sweep a run.name",
    )
    check(
        first.run.resume != "never",
        "run.resume=never would train jobs again whose results the search already has; leave it "
        "out, or choose another run.name",
    )


def _check_lock_step(settings: SweepConfig) -> None:
    """Check that the ranks of torchrun, which run all jobs in lock-step, can run the sweep."""
    without_torchrun = f"{command()} -m ddp.nproc_per_node=N ..."
    check(
        settings.parallel == 1,
        f"sweep.parallel={settings.parallel} does not work under torchrun; run {without_torchrun}",
    )
    check(
        settings.retries == 0,
        f"sweep.retries={settings.retries} does not work under torchrun, whose ranks fail together"
        f"; run {without_torchrun}",
    )


def _check_metric(config: Config) -> None:
    """Check that the jobs measure `sweep.metric`. Metrics of user code are checked by the jobs."""
    settings = config.sweep
    if settings.metric is None:
        return
    name = objective_named(settings.metric).key
    is_evaluated = name.startswith("val_") or name in BITS_METRICS
    check(
        settings.pruner == "none" or is_evaluated,
        f"sweep.pruner={settings.pruner} compares evaluations, which do not measure {name}; "
        "leave the pruner out, or choose a sweep.metric of the validation split",
    )
    has_own_code = config.task.code is not None or config.model.code is not None
    is_user_metric = has_own_code and name.startswith(("val_", "train_", "test_"))
    check(
        is_user_metric or name in RESULT_METRICS,
        f"sweep.metric={settings.metric} is not a number of result.json; "
        f"{hint_at(name, RESULT_METRICS)}",
    )


def _check_remote(settings: SweepConfig, launcher: str) -> None:
    """Check that an external launcher, which runs batches of jobs, can run the sweep."""
    check(
        settings.pruner == "none",
        f"sweep.pruner={settings.pruner} is for jobs on this machine, not for {launcher}; leave "
        "out the pruner, or sweep=slurm or sweep=ray",
    )
    check(
        settings.parallel != "auto",
        f"sweep.parallel=auto is for jobs on this machine, not for {launcher}; give a number",
    )
    check(
        settings.is_search or settings.parallel == 1,
        f"sweep.parallel={settings.parallel} does not limit the jobs of {launcher}, which gets all "
        "jobs of a grid at once; leave sweep.parallel out, and set the launcher's own limit",
    )
    check(
        settings.retries == 0 and settings.max_failures is None,
        f"sweep.retries and sweep.max_failures are for jobs on this machine, not for {launcher}; "
        "leave them out",
    )


def plan_slots(settings: SweepConfig, jobs: list[Config], directory: Path | None) -> list[Slot]:
    """Plan a slot for each concurrent job. Return no slots if jobs run one after another.

    Args:
        jobs: Configurations of jobs of the sweep.
        directory: Directory of the sweep. If an earlier start has recorded there how many cores a
            job has, this number is used again. None if the sweep has no directory of its own.

    Raises:
        ConfigError: This machine has too few GPUs or cores.
    """
    if settings.parallel == 1:
        return []
    for job in jobs:
        check(
            job.ddp.nproc_per_node != "gpu",
            "ddp.nproc_per_node=gpu takes all GPUs for one job; give a number of workers",
        )
    ranks = max(job.ddp.ranks_here for job in jobs)
    gpus = None
    if any(job.trainer.device != "cpu" for job in jobs):
        gpus = visible_gpus() or None
    if gpus is not None and ranks > len(gpus):
        raise ConfigError(
            f"ddp.nproc_per_node={ranks} needs {ranks} GPUs for a job, but this machine has "
            f"{len(gpus)}; choose at most {len(gpus)}, or trainer.device=cpu"
        )
    if settings.parallel == "auto":
        n = max(1, (count_cores() if gpus is None else len(gpus)) // ranks)
    else:
        n = settings.parallel
    check_processes("sweep.parallel", n, n_parents=ranks, min_bytes=MIN_RANK_BYTES * ranks)
    if gpus is not None and n * ranks > len(gpus):
        raise ConfigError(
            f"sweep.parallel={n} needs {n * ranks} GPUs, {ranks} for each job, but this machine "
            f"has {len(gpus)}; choose at most {len(gpus) // ranks}, or trainer.device=cpu"
        )
    kept = SweepFile(directory).cores
    return divide(n, cores(), kept or max(1, count_cores() // n), gpus)
