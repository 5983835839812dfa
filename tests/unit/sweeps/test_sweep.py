"""The exit code of a sweep with failed jobs."""

from __future__ import annotations

import pytest
from multiprocess.ranks import configure, typed

from mingpt_ddp.config.job import Outcome, RunStatus, Trial
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import FAILURE, USER_ERROR
from mingpt_ddp.distributed.root_cause import failed
from mingpt_ddp.errors import ConfigError, JobError
from mingpt_ddp.sweeps.sweep import Sweep

CRASH = failed(JobError("crashed"), FAILURE)
MISTAKE = failed(ConfigError("a mistake"))


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([MISTAKE], USER_ERROR),
        ([CRASH], FAILURE),
        ([CRASH, MISTAKE], USER_ERROR),
        ([MISTAKE, CRASH], FAILURE),
        ([CRASH, Outcome(RunStatus.COMPLETE)], USER_ERROR),  # the other job's
    ],
    ids=str,
)
def test_the_last_attempt_of_each_job_decides(attempts, code, tmp_path):
    config = typed(configure(f"run.root={tmp_path}"))
    sweep = Sweep(env=DistEnv(), config=config, directory=tmp_path, planned=2)
    sweep.record(Trial(1, "another job"), MISTAKE)
    for outcome in attempts:
        if outcome.status is RunStatus.COMPLETE:
            outcome = Outcome(RunStatus.COMPLETE, tmp_path / "job", 1.0)
        sweep.failed.pop(0, None)  # as a retry does
        sweep.record(Trial(0, "a job"), outcome)
    end = sweep.finish()
    assert (end.exit_code, type(end.error)) == (code, JobError)
