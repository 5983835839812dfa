"""Run the jobs of a sweep: one after another, concurrently, or with an external launcher."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.resolve import compose_job, resolve
from mingpt_ddp.config.job import Job, Outcome, RunStatus, SweepPlace, existing_name
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.errors import ConfigError, JobError, RunError
from mingpt_ddp.process import logs
from mingpt_ddp.process.exit import FAILURE
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.root_cause import ProcessExit, failed
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.study.sweeps.scheduler import Scheduler
from mingpt_ddp.study.sweeps.script_job import run_script
from mingpt_ddp.study.sweeps.sources import Source
from mingpt_ddp.study.sweeps.sweep import Sweep
from mingpt_ddp.training.checked_job import checked_job
from mingpt_ddp.training.run_job import run_job


def run_jobs(
    sweep: Sweep,
    context: HydraContext,
    task_function: Callable[..., float],
    config: DictConfig,
) -> None:
    """Run the jobs of a sweep that have not ended yet.

    Return when no job is left, when too many jobs have failed, or when `sweep.stopped` is set.
    Before this call, `start_sweep` in preflight.py has checked the sweep and locked its directory.
    Afterwards, `cli/train_job.py` prints the table of results.

    Args:
        task_function: Trains the job whose configuration Hydra has composed. Called only in the
            processes of an external launcher.
        config: Hydra's configuration of the sweep.
    """
    source = sweep.source
    assert source is not None
    sweep.env.call_on_rank_zero(lambda: _write_multirun(sweep.directory, config))
    compose = partial(_compose, context, config, source)
    if sweep.slots:
        Scheduler(sweep, source, compose).run()
        return

    def launcher(task: TaskFunction) -> Launcher:
        return Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task, config=config
        )

    if not sweep.is_remote:
        _run_in_turn(sweep, source, run_script if sweep.script else run_job, launcher)
        return
    raise_interrupts()  # Ctrl-C must also end the processes that run the jobs
    remote = launcher(partial(task_function, swept=source.swept))
    try:
        if sweep.settings.is_search or sweep.settings.until is not None:
            _run_batches(sweep, source, remote, compose)
        else:
            _run_grid(sweep, source, remote)
    except (HydraException, JobError):
        raise
    except Exception as error:  # an error of the launcher itself
        raise RunError(str(error)) from error


def _write_multirun(directory: Path, config: DictConfig) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")


def _compose(context: HydraContext, config: DictConfig, source: Source, number: int) -> Job:
    """Compose the job with this number, and check it.

    Raises:
        UserError: The job is invalid.
    """
    try:
        job = compose_job(context, config, number, source.overrides(number), source.swept)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    return _checked(job)


def _checked(job: Job) -> Job:
    job = checked_job(job)
    check_machine(job.config)
    return job


def _run_in_turn(
    sweep: Sweep,
    source: Source,
    run: Callable[..., Outcome],
    launcher_of: Callable[[TaskFunction], Launcher],
) -> None:
    """Run one job after another, in this process or in workers that this process starts.

    Hydra's launcher composes each job, and calls the user's callbacks.

    Args:
        run: Runs a job: either `run_job` or `run_script`, which take the same arguments.
        launcher_of: Makes Hydra's launcher for a task.
    """
    task = _LaunchedJob(sweep, source, run)
    launcher = launcher_of(task)
    for number in sweep.jobs_left(source):
        overrides = source.overrides(number)
        task.place = source.place(number, overrides)
        for _ in sweep.attempts(number):
            launcher.launch([overrides], initial_job_idx=number)
            if not task.outcome.ends_process:
                logs.to_console(sweep.env)
            if sweep.stopped is not None or not task.outcome.has_failed:
                break


class _LaunchedJob:
    """The task that Hydra's launcher calls for each job.

    It keeps the outcome of the last job, because the launcher hides it.
    """

    def __init__(self, sweep: Sweep, source: Source, run: Callable[..., Outcome]) -> None:
        self.sweep = sweep
        self.source = source
        self.run = run
        self.place = SweepPlace(0, "")  # number and label of the next job
        self.outcome = Outcome(RunStatus.COMPLETE)  # outcome of the last job

    def __call__(self, cfg: DictConfig) -> float:
        """Run the job that Hydra has composed, and record its outcome.

        Raises:
            JobError: The job has failed.
        """
        self.outcome = self.sweep.record(self.place, self._run(cfg))
        if not self.outcome.ends_process:
            logs.close()
        if self.outcome.value is None:
            raise JobError(f"{self.place.label} failed")
        return self.outcome.value

    def _run(self, cfg: DictConfig) -> Outcome:
        started_at = time.monotonic()
        logs.to_console(self.sweep.env)
        exits = ProcessExit()
        SignalHandler(exits).install()
        try:
            job = _checked(resolve(cfg, self.source.swept))
            return self.run(job, self.sweep.env, self.sweep, started_at)
        except Exception as error:  # Hydra's launcher would not report it
            return exits.outcome_of(error, in_sweep=True)


def _run_grid(sweep: Sweep, source: Source, launcher: Launcher) -> None:
    """Run all jobs of a grid with an external launcher. Record the first job that failed."""
    jobs = [source.overrides(number) for number in range(sweep.n_jobs)]
    for number, returned in enumerate(launcher.launch(jobs, initial_job_idx=0)):
        try:
            _ = returned.return_value  # raises the error if the job has failed
        except JobError as error:
            sweep.failed[number] = str(error.args[0])
            return


def _run_batches(
    sweep: Sweep, source: Source, launcher: Launcher, compose: Callable[[int], Job]
) -> None:
    """Run batches of jobs with an external launcher, one after another.

    A batch of a search has `sweep.parallel` trials. With sweep.until=decided, a batch has one seed
    of each setting that needs more seeds.
    """
    left = sweep.jobs_left(source)
    while numbers := [*itertools.islice(left, sweep.batch_size)]:
        batch = [source.overrides(number) for number in numbers]
        results = launcher.launch(batch, initial_job_idx=numbers[0])
        for number, returned in zip(numbers, results, strict=True):
            job = compose(number)
            directory = job.with_run(name=existing_name(job)).directory
            place = source.place(number)
            if returned.status is JobStatus.COMPLETED and read_result(directory):
                sweep.record_done(place, directory)
            else:
                error = RunError(_reason(returned))
                sweep.record(place, failed(error, FAILURE))


def _reason(returned: object) -> str:
    try:
        _ = returned.return_value  # type: ignore[attr-defined]
    except JobError as error:
        return str(error.args[0])
    except Exception as error:
        return explain(error)
    return (
        "the job has ended, but its directory has no result.json on this machine; let run.root "
        "name a directory that all machines share"
    )
