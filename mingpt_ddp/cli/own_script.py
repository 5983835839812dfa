"""Compose and check the configuration of a user's script that has its own training loop."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.cli.command_line import prepare_command_line
from mingpt_ddp.cli.hydra_callbacks import leave_hydra_on_error, started_sweep
from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose import resolve as from_hydra
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.job import EndsProcess, Job, Outcome, RunStatus, run_name
from mingpt_ddp.config.own_loop import begin_to_resolve, refuse_unread_keys
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.process.env import read_env, take_caller
from mingpt_ddp.process.root_cause import exit_with
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.training.checked_job import checked_job


def resolve(words: Sequence[str] | None = None) -> Job:
    """Return the job of this script. Its `config` is checked, and has a `run.name`.

    If -m is among the words, run the script again for each job of the sweep, under torchrun if
    `ddp.nproc_per_node` is set. Exit when all jobs have ended.

    Args:
        words: Keys and presets, as on the command line of main.py. None to read them from the
            script's command line.

    Raises:
        UserError: A key or a value is invalid. The message is one line.
    """
    script = begin_to_resolve()
    caller = take_caller()
    if caller is not None and caller.job_file is not None:  # this is a job of a sweep
        return checked_job(Job.from_json(Path(caller.job_file).read_text()))
    if words is not None:
        sys.argv[1:] = words
    jobs = list[Job]()

    def task(cfg: DictConfig, swept: Collection[str] | None = None) -> float:
        with leave_hydra_on_error():
            jobs.append(checked_job(from_hydra.resolve(cfg, swept)))
        return 0.0

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
    [job] = jobs
    refuse_unread_keys(job.command_line_keys, script)
    ranks = job.config.ddp.nproc_per_node
    check(
        not ranks
        or not read_env().is_standalone
        or "ddp.nproc_per_node" not in job.command_line_keys,
        f"ddp.nproc_per_node={ranks} is for main.py and for sweeps; start a single run of a script "
        f"with torchrun --nproc_per_node={ranks} {script.name}",
    )
    return job.with_run(name=run_name(job.config))
