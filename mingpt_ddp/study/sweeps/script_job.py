"""A job of a sweep over a script with a training loop of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mingpt_ddp.config.job import Job, Outcome, RunStatus
from mingpt_ddp.errors import JobError, RunError
from mingpt_ddp.process.env import Caller, DistEnv
from mingpt_ddp.process.interrupts import handle
from mingpt_ddp.process.linux import die_with_parent
from mingpt_ddp.training.run_job import Records, name_job


def run_script(job: Job, env: DistEnv, records: Records, started_at: float) -> Outcome:
    """Run the script of this process once more, in a process of its own, for a job of its sweep."""
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
            start_new_session=True,  # so that Ctrl-C arrives only once, sent from here
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
    with contextlib.suppress(RunError):  # the script has written no result.json
        value = records.value_of(job)
    return Outcome(RunStatus.COMPLETE, job.directory, value)
