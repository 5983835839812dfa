"""Run one job of a sweep over a user's script that has its own training loop."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mingpt_ddp.config.job import Job, Outcome, Reporter, RunStatus
from mingpt_ddp.errors import JobError, RunError
from mingpt_ddp.process.env import Caller, DistEnv
from mingpt_ddp.process.exit import FAILURE
from mingpt_ddp.process.interrupts import handle
from mingpt_ddp.process.linux import die_with_parent
from mingpt_ddp.storage.yaml_and_json import load_yaml
from mingpt_ddp.training.run_job import Records, name_job


def run_script(job: Job, env: DistEnv, records: Records, started_at: float) -> Outcome:
    """Start the script of this process again, in a new process, to run one job of its sweep."""
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
        outcome = Path(scratch, "outcome.json")
        caller = Caller(os.getpid(), outcome_file=str(outcome), job_file=str(file))
        overrides: list[str] = load_yaml(job.hydra_files["overrides.yaml"])
        overrides = [each for each in overrides if not each.startswith(("run.name=", "sweep"))]
        overrides.append(f"run.name={job.config.run.name}")
        with subprocess.Popen(
            [sys.executable, *launcher, sys.argv[0], *overrides],
            env={**os.environ, **caller.environ()},
            # Ctrl-C does not reach a new session. `forward` sends it on once.
            start_new_session=True,
            preexec_fn=die_with_parent,
        ) as process:

            def forward(number: int, frame: object) -> None:
                received.append(number)
                process.send_signal(number)

            before = handle(forward)
            code = process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        ended = outcome.read_text() if outcome.exists() else None
    if received:
        code = 128 + received[-1]
        return Outcome(RunStatus.PREEMPTED, job.directory, exit_code=code, signalled=True)
    if code != 0 and ended:  # the script has printed this error already
        failure = Outcome.from_json(ended)
        return replace(failure, directory=job.directory, reporter=Reporter.NOBODY)
    if code != 0:
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        error = JobError(f"the script {how}")
        return Outcome(RunStatus.FAILED, job.directory, error=error, exit_code=FAILURE)
    value = None
    with contextlib.suppress(RunError):  # the script has written no result.json
        value = records.value_of(job)
    return Outcome(RunStatus.COMPLETE, job.directory, value)
