"""Run a process that trains: compose and check the configuration, train, and report the outcome.

`commands/train.py` calls `main`. `distributed/launch/workers.py` calls `train_as_worker` in each
local worker.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.cli.command_line import prepare_command_line
from mingpt_ddp.cli.hydra_callbacks import started_sweep
from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.compose.resolve import resolve
from mingpt_ddp.config.job import EndsProcess, Job, Outcome, Reporter, RunStatus
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.distributed.launch.channels import WorkerEnds
from mingpt_ddp.errors import ConfigError, JobError, UserError
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import (
    Caller,
    DistEnv,
    has_parent_launcher,
    process_start_time,
    read_env,
    take_caller,
)
from mingpt_ddp.process.exit import exit_process
from mingpt_ddp.process.interrupts import INTERRUPTED
from mingpt_ddp.process.parent_watch import die_with_parent
from mingpt_ddp.process.root_cause import ProcessExit, exit_with, failed, tell_caller
from mingpt_ddp.process.signals import SignalHandler
from mingpt_ddp.process.terminal import echo, escape_what_streams_cannot_encode
from mingpt_ddp.storage.urls import check_text_exists
from mingpt_ddp.training.checked_job import checked_job
from mingpt_ddp.training.run_job import SingleRun, run_job

log = logging.getLogger(__name__)


def main(to_words: Callable[[list[str]], list[str]] = list) -> None:
    """Train the job of the command line, or of a caller in Python. Always exit through os._exit.

    The caller is a process that has called `mingpt_ddp.train` or `mingpt_ddp.sweep`.

    Normal interpreter shutdown sometimes aborts in a background thread of torch, which torchrun
    counts as a failure.

    Args:
        to_words: Turns the arguments of the command into the words that Hydra reads.
    """
    _set_up_process()
    caller = take_caller()
    if caller or has_parent_launcher():
        die_with_parent(caller.pid if caller else None)
    outcome = _run(caller, to_words)
    tell_caller(outcome)
    # A caller in Python raises the error, so this process does not print it too.
    exit_with(outcome, prints=caller is None)


def _run(caller: Caller | None, to_words: Callable[[list[str]], list[str]]) -> Outcome:
    """Train the job of the command line, or of a caller in Python, and return its outcome.

    Hydra does not pass on the value that `task` returns. `task` therefore appends the outcome of a
    complete run to `outcomes`. A run that is not complete leaves Hydra by raising EndsProcess.
    """
    exits = ProcessExit()
    outcomes = list[Outcome]()
    ended_by: JobError | None = None
    try:
        if text := hydra_utils.answer(sys.argv[1:]):
            echo(text)
            return Outcome(RunStatus.COMPLETE)
        sys.argv[1:] = to_words(sys.argv[1:])
        prepare_command_line(exits.env)
        if caller is not None and caller.job_file is not None:
            return _run_job_in_file(caller.job_file)

        def task(cfg: DictConfig, swept: Collection[str] | None = None) -> float:
            return train(cfg, swept, outcomes)

        try:
            if text := hydra_utils.run_hydra(task):
                echo(text)
        finally:
            if "ray" in sys.modules:  # its processes would survive os._exit
                sys.modules["ray"].shutdown()
    except EndsProcess as end:
        return end.outcome
    except JobError as error:
        if started_sweep() is None:
            return failed(error)
        # A sweeper of another package ends at its first failed job. The table of the sweep's jobs
        # is still printed below.
        ended_by = error
    except UserError as error:
        return failed(error)
    except KeyboardInterrupt:  # raised only while other processes run the jobs
        log.error("interrupted; rerun the same command to resume")
        return Outcome(RunStatus.FAILED, exit_code=INTERRUPTED, reporter=Reporter.NOBODY)
    except Exception as error:  # an error of Hydra itself
        return failed(ConfigError(explain(error)))
    logs.to_console(exits.env)
    sweep = started_sweep()
    if sweep is not None:
        outcome = sweep.finish()
        # The sweep does not know of a job that was invalid, so return that error here.
        return failed(ended_by) if ended_by and not outcome.has_failed else outcome
    return outcomes[-1] if outcomes else Outcome(RunStatus.COMPLETE)


def train(cfg: DictConfig, swept: Collection[str] | None, outcomes: list[Outcome]) -> float:
    """Train the configuration that Hydra has composed: a single run, or a job of a sweep.

    A job of a sweep gets here only if a sweeper of another package chose it, or if it runs in a
    process of an external launcher. `study/sweeps/sweeper.py` runs all other jobs without this
    function.

    Args:
        cfg: The composed configuration.
        swept: The keys that the sweep varies. None to derive them from Hydra's state.
        outcomes: If a single run is complete, its outcome is appended here.

    Returns:
        The validation loss of a single run, or the objective of a job.

    Raises:
        EndsProcess: The run is not complete, or no other job may follow.
        JobError: The job of a sweep has failed. Another job may follow.
    """
    exits = ProcessExit()
    logs.to_console(exits.env)
    SignalHandler(exits).install()
    sweep = started_sweep()
    try:
        job = checked_job(resolve(cfg, swept))
        env = _check(job)
    except Exception as error:
        outcome = exits.outcome_of(error, in_sweep=sweep is not None or swept is not None)
        if outcome.ends_process:
            raise EndsProcess(outcome) from None
        log.error("%s", outcome.error)
        raise JobError(f"a job of the sweep is invalid: {outcome.error}") from None
    if job.place is None:
        return _train_run(job, env, outcomes)
    from mingpt_ddp.study.sweeps.other_sweepers import train_for_other_sweeper

    return train_for_other_sweeper(job, job.place, env, sweep)


def _train_run(job: Job, env: DistEnv, outcomes: list[Outcome]) -> float:
    """Train a single run and return its loss. Raise EndsProcess if it is not complete."""
    outcome = run_job(job, env, SingleRun(), process_start_time())
    if outcome.value is None:
        raise EndsProcess(outcome)
    outcomes.append(outcome)
    return outcome.value


def _check(job: Job) -> DistEnv:
    """Check that this machine can run the job. Return the environment of this process."""
    config = job.config
    check_machine(config)
    if job.place is None:  # in a sweep all jobs may be complete, and then they need no text
        check_text_exists(config)
    ignored = sorted(key for key in job.command_line_keys if key.startswith("sweep."))
    if ignored and job.place is None:
        log.warning("%s has no effect on a single run; add -m for a sweep", ", ".join(ignored))
    return read_env(config.ddp.ranks_here)


def _set_up_process() -> None:
    # With the default threshold, garbage collection takes a third of the time to import torch.
    gc.set_threshold(20_000)
    if os.getpid() == 1:  # the kernel drops signals to the first process of a container
        signal.signal(signal.SIGTERM, lambda number, _: exit_process(None, 128 + number))


# The two functions below take a job as JSON, instead of words from the command line.


def _run_job_in_file(path: str) -> Outcome:
    """Run the job that a caller in Python has written to a file as JSON."""
    try:
        job = checked_job(Job.from_json(Path(path).read_text()))
        return run_job(job, _check(job), SingleRun(), process_start_time())
    except Exception as error:
        return ProcessExit().outcome_of(error)


def train_as_worker(text: str, ends: WorkerEnds) -> None:
    """Train the job that the parent of this local worker has resolved. Always exit.

    Args:
        text: The job as JSON.
        ends: Connections from this worker to its parent.
    """
    _set_up_process()
    exits = ProcessExit()
    logs.to_console(exits.env)
    escape_what_streams_cannot_encode()
    logging.raiseExceptions = False
    SignalHandler(exits).install()
    try:
        job = Job.from_json(text)
        records = SingleRun(ends.ask_pruner if ends.has_pruner else None)
        outcome = run_job(job, exits.env, records, process_start_time())
    except Exception as error:
        outcome = exits.outcome_of(error)
    ends.send(outcome)
    exit_with(outcome)
