"""Run the jobs of a sweep: one after another, concurrently, or by an external launcher."""

import contextlib
import itertools
import logging
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.distributed import logs
from mingpt_ddp.errors import JobError
from mingpt_ddp.interrupts import raise_interrupts
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.sweeps.job import job_name
from mingpt_ddp.sweeps.scheduler import Compose, Scheduler
from mingpt_ddp.sweeps.sources import Source
from mingpt_ddp.sweeps.sweep import Sweep
from mingpt_ddp.training.start.checked_config import checked_config

log = logging.getLogger(__name__)


def run_jobs(
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    max_batch_size: int | None,
) -> None:
    """Run the jobs of the current sweep that are left.

    Args:
        task_function: Trains the job that Hydra's state describes.
        config: Hydra's configuration of the sweep.
        max_batch_size: Jobs of a grid that an external launcher gets at once. None for all.
    """
    sweep = Sweep.current()
    source = sweep.source
    assert source is not None
    sweep.env.call_on_rank_zero(lambda: _write_multirun(sweep.directory, config))
    if sweep.slots:
        Scheduler(sweep, source, partial(compose, context, config)).run()
        return
    if sweep.is_remote:
        raise_interrupts()  # Ctrl-C must also end the processes that run the jobs
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task_function, config=config
    )
    if sweep.is_remote and sweep.settings.is_search:
        _run_batches(sweep, source, launcher, partial(compose, context, config))
    elif sweep.is_remote:
        _run_grid(sweep, source, launcher, max_batch_size or sweep.planned)
    else:
        _run_in_turn(sweep, source, launcher)


def _write_multirun(directory: Path, config: DictConfig) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")


def _run_in_turn(sweep: Sweep, source: Source, launcher: Launcher) -> None:
    """Run one job after the other, in this process or by a parent of workers."""
    for number in sweep.jobs_left(source):
        overrides = source.overrides(number)
        for _ in sweep.attempts(number):
            (returned,) = launcher.launch([overrides], initial_job_idx=number)
            logs.to_console(sweep.env)  # the job has closed the log
            with contextlib.suppress(JobError):  # already recorded
                _ = returned.return_value  # raises the error of a job that has failed
                break


def _run_grid(sweep: Sweep, source: Source, launcher: Launcher, size: int) -> None:
    """Give an external launcher batches of the jobs of a grid."""
    jobs = [source.overrides(number) for number in range(sweep.planned)]
    for first in range(0, sweep.planned, size):
        for returned in launcher.launch(jobs[first : first + size], initial_job_idx=first):
            _ = returned.return_value  # raises the error of a job that has failed


def _run_batches(
    sweep: Sweep,
    source: Source,
    launcher: Launcher,
    compose: Compose,
) -> None:
    """Run batches of `sweep.parallel` trials elsewhere. Each batch waits for the one before."""
    left = sweep.jobs_left(source)
    while numbers := [*itertools.islice(left, int(sweep.settings.parallel))]:
        batch = [source.overrides(number) for number in numbers]
        results = launcher.launch(batch, initial_job_idx=numbers[0])
        for number, words, returned in zip(numbers, batch, results, strict=True):
            job = source.job(number)
            job_config = checked_config(compose(number, words))
            name = job_name(job_config, hydra_utils.swept_overrides())
            directory = Path(job_config.run.root, name)
            if returned.status is JobStatus.COMPLETED and read_result(directory):
                sweep.record_done(job, directory)
            else:
                sweep.record_failed(job, _reason(returned), 1)


def _reason(returned: object) -> str:
    try:
        _ = returned.return_value  # type: ignore[attr-defined]
    except Exception as error:
        return explain(error)
    return "its directory has no result.json here"


def compose(
    context: HydraContext, config: DictConfig, number: int, overrides: list[str]
) -> DictConfig:
    """Compose a job's configuration and make it Hydra's state, as Hydra's own launcher does."""
    composed = context.config_loader.load_sweep_config(config, [*overrides])
    with open_dict(composed):
        composed.hydra.job.id = str(number)
        composed.hydra.job.num = number
    HydraConfig.instance().set_config(composed)
    task_config = composed.copy()
    with open_dict(task_config):
        del task_config["hydra"]
    return task_config
