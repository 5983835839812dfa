"""The job of a script with a training loop of its own."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.cli.command_line import prepare_command_line
from mingpt_ddp.cli.hydra_callbacks import started_sweep
from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose import resolve as from_hydra
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.job import EndsProcess, Job, Outcome, RunStatus, run_name
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.process.env import read_env, take_caller
from mingpt_ddp.process.root_cause import exit_with
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.training.checked_job import checked_job


def resolve(words: Sequence[str] | None = None) -> Job:
    """Return the job of this script. Its `config` is checked, and has a `run.name`.

    With -m among the words, run the script once more for each job of the sweep, under torchrun if
    `ddp.nproc_per_node` is set. Exit when all jobs have ended.

    Args:
        words: Words as on the command line of main.py, with the same keys and presets. None for
            the command line of the script.

    Raises:
        UserError: A key or a value is invalid. The message is one line.
    """
    caller = take_caller()
    if caller is not None and caller.job is not None:  # this is a job of a sweep
        return checked_job(Job.from_json(Path(caller.job).read_text()))
    if words is not None:
        sys.argv[1:] = words
    task = _ResolveScript()
    prepare_command_line(read_env())
    try:
        text = hydra_utils.answer(sys.argv[1:]) or hydra_utils.run_hydra(task)
    except EndsProcess as end:
        if isinstance(end.outcome.error, UserError):
            raise end.outcome.error from None
        exit_with(end.outcome)
    except UserError:
        raise
    except Exception as error:  # an error of Hydra itself
        raise ConfigError(explain(error)) from error
    if text:
        echo(text)
        exit_with(Outcome(RunStatus.COMPLETE))
    if sweep := started_sweep():
        exit_with(sweep.finish())
    [job] = task.jobs
    return job.with_run(name=run_name(job.config))


class _ResolveScript:
    """The task that Hydra calls with what it has composed. Keep the job for the script."""

    is_script = True  # `study/sweeps/sweeper.py` runs the script for each job of a sweep

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(self, cfg: DictConfig, swept: Collection[str] | None = None) -> float:
        self.jobs.append(checked_job(from_hydra.resolve(cfg, swept)))
        return 0.0
