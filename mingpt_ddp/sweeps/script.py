"""The job of a script with a training loop of its own, and a sweep over such a script."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.compose import resolve as composed
from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.config.job import EndsProcess, Job, Outcome, RunStatus, run_name
from mingpt_ddp.distributed.env import Caller, DistEnv, read_env, take_caller
from mingpt_ddp.distributed.root_cause import exit_with
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.interrupts import handle
from mingpt_ddp.linux import die_with_parent
from mingpt_ddp.sweeps.preflight import started_sweep
from mingpt_ddp.terminal import echo
from mingpt_ddp.training.run_job import Records, name_job
from mingpt_ddp.training.start.checked_job import checked_job
from mingpt_ddp.training.start.command_line import prepare_command_line


def resolve(words: Sequence[str] | None = None) -> Job:
    """Return the job of this script: its checked `config`, with its `run.name`.

    With -m among the words, run the script again for each job of the sweep, under torchrun if
    `ddp.nproc_per_node` is set, and exit when all jobs have ended.

    Args:
        words: as on the command line of main.py, whose keys and presets they use. None for the
            command line of the script.

    Raises:
        UserError: a key or a value is invalid; one line.
    """
    caller = take_caller()
    if caller is not None and caller.job is not None:  # this is a job of a sweep
        return checked_job(Job.from_json(Path(caller.job).read_text()))
    if words is not None:
        sys.argv[1:] = words
    jobs = list[Job]()

    def task(cfg: DictConfig, swept: Collection[str] | None = None) -> float:
        jobs.append(checked_job(composed.resolve(cfg, swept)))
        return 0.0

    vars(task)["run_job"] = _run_script  # instead of main.py's own loop
    prepare_command_line(read_env())
    try:
        text = hydra_utils.answer(sys.argv[1:]) or hydra_utils.run_hydra(task)
    except EndsProcess as end:
        if isinstance(end.outcome.error, UserError):
            raise end.outcome.error from None
        exit_with(end.outcome)
    except UserError:
        raise
    except Exception as error:  # of Hydra
        raise ConfigError(explain(error)) from error
    if text:
        echo(text)
        exit_with(Outcome(RunStatus.COMPLETE))
    if sweep := started_sweep():
        exit_with(sweep.finish())
    [job] = jobs
    return job.with_run(name=run_name(job.config))


def _run_script(job: Job, env: DistEnv, records: Records, started_at: float) -> Outcome:
    """Run this script as a process of its own for one job of a sweep."""
    ready = name_job(job, env, records)
    if isinstance(ready, Outcome):
        return ready
    job = ready
    launcher = list[str]()
    if n := job.config.ddp.nproc_per_node:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    received = list[int]()
    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-") as scratch:
        file = Path(scratch, "job.json")
        file.write_text(job.to_json())
        with subprocess.Popen(
            [sys.executable, *launcher, sys.argv[0]],
            env={**os.environ, **Caller(os.getpid(), job=str(file)).environ()},
            start_new_session=True,  # Ctrl-C arrives once, from here
            preexec_fn=die_with_parent,
        ) as process:

            def forward(number: int, frame: object) -> None:
                received.append(number)
                process.send_signal(number)

            before = handle(forward)
            code = process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
    if received:
        code = 128 + received[-1]
        return Outcome(RunStatus.PREEMPTED, job.directory, exit_code=code, signalled=True)
    if code != 0:
        error = JobError(f"the script ended with exit code {code}")
        return Outcome(RunStatus.FAILED, job.directory, error=error, exit_code=code)
    value = None
    with contextlib.suppress(RunError):  # it writes no result.json
        value = records.value_of(job)
    return Outcome(RunStatus.COMPLETE, job.directory, value)
