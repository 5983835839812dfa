"""Check the keys of `sweep`, and plan the slots of concurrent jobs."""

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
from mingpt_ddp.study.sweeps.checks import has_own_sweeper

BITS = ("bits_per_byte", "bits_per_char")
# Numbers of result.json that may be an objective.
MEASURED = (
    "val_loss",
    "val_accuracy",
    "best_val_loss",
    "train_loss",
    *BITS,
    *(f"val_{name}" for name in BITS),
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
    """Check the keys of `sweep` against the machine and the rest of the command.

    Args:
        jobs: The checked configurations. The first job comes first.

    Raises:
        ConfigError: The settings cannot be combined.
    """
    settings = jobs[0].sweep
    check(
        all(job.sweep == settings for job in jobs),
        "sweep.* holds for all jobs of a sweep; give each key one value",
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
        f"sweep.pruner={settings.pruner} ends jobs of a search: add sweep=optuna, or leave it out",
    )
    check(
        settings.pruner != "none" or not settings.pruner_settings,
        "sweep.pruner_settings is used by a pruner only: add sweep.pruner=median, or leave it out",
    )
    _check_metric(jobs[0])
    return settings


def _check_sweeper(config: DictConfig, settings: SweepConfig) -> None:
    """Check the chosen sweeper."""
    check(
        has_own_sweeper(config)
        or (not settings.is_search and settings.parallel == 1 and settings.until is None),
        "sweep.sampler, sweep.parallel and sweep.until need hydra/sweeper=mingpt_ddp, not "
        f"{config.hydra.sweeper._target_}",
    )


def _check_search(first: Config) -> None:
    """Check that a search can compare its jobs."""
    check(
        first.run.name is not None,
        "a search compares the jobs of one directory; give the sweep a run.name",
    )
    check(
        first.run.resume != "never",
        "run.resume=never would train jobs again whose results the search already has; choose "
        "another run.name",
    )


def _check_lock_step(settings: SweepConfig) -> None:
    """Check that the ranks of torchrun can run the sweep: there is no parent of all jobs."""
    started = f"{command()} -m ddp.nproc_per_node=N"
    check(
        settings.parallel == 1,
        f"sweep.parallel={settings.parallel} needs a parent of all jobs: {started} ...",
    )
    check(
        settings.retries == 0,
        f"sweep.retries={settings.retries}: all ranks fail alike in lock-step; use {started}",
    )


def _check_metric(config: Config) -> None:
    """Check that the jobs measure `sweep.metric`. For user code, only the jobs can check it."""
    settings = config.sweep
    if settings.metric is None:
        return
    name = objective_named(settings.metric).series
    is_evaluated = name.startswith("val_") or name in BITS
    check(
        settings.pruner == "none" or is_evaluated,
        f"sweep.pruner={settings.pruner} judges evaluations, which do not measure {name}; "
        "leave the pruner out, or choose a sweep.metric of the validation split",
    )
    has_own_code = config.task.code is not None or config.model.code is not None
    is_of_user = has_own_code and name.startswith(("val_", "train_", "test_"))
    check(
        is_of_user or name in MEASURED,
        f"sweep.metric={settings.metric} is not a number of result.json; {hint_at(name, MEASURED)}",
    )


def _check_remote(settings: SweepConfig, launcher: str) -> None:
    """Check that an external launcher can run the sweep: it takes batches and has no pruner."""
    check(
        settings.pruner == "none",
        f"sweep.pruner={settings.pruner} needs jobs of this machine, not of {launcher}; leave "
        "sweep=slurm or sweep=ray out, or the pruner",
    )
    check(
        settings.parallel != "auto",
        f"sweep.parallel=auto is for jobs of this machine, not of {launcher}; give a number",
    )
    check(
        settings.is_search or settings.parallel == 1,
        f"sweep.parallel={settings.parallel}: {launcher} gets all jobs of a grid at once, and its "
        "own settings say how many run; leave sweep.parallel out",
    )
    check(
        settings.retries == 0 and settings.max_failures is None,
        f"sweep.retries and sweep.max_failures are for jobs of this machine, not of {launcher}; "
        "leave them out",
    )


def plan_slots(settings: SweepConfig, jobs: list[Config], directory: Path | None) -> list[Slot]:
    """Return one slot for each concurrent job, or none if jobs run one after another.

    Args:
        directory: Directory of the sweep, which records the cores of a job. None if the sweep has
            no directory of its own.

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
            f"ddp.nproc_per_node={ranks} needs {ranks} GPUs for a job, and this machine has "
            f"{len(gpus)}"
        )
    if settings.parallel == "auto":
        n = max(1, (count_cores() if gpus is None else len(gpus)) // ranks)
    else:
        n = settings.parallel
    check_processes("sweep.parallel", n, per=ranks, min_bytes=MIN_RANK_BYTES * ranks)
    if gpus is not None and n * ranks > len(gpus):
        raise ConfigError(
            f"sweep.parallel={n} needs {n * ranks} GPUs, {ranks} for a job, and this machine "
            f"has {len(gpus)}; choose at most {len(gpus) // ranks}, or trainer.device=cpu"
        )
    kept = SweepFile(directory).cores
    return divide(n, cores(), kept or max(1, count_cores() // n), gpus)
