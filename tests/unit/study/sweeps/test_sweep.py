"""The exit code of a sweep with failed jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from multiprocess.ranks import configure, typed

from mingpt_ddp.config.job import Outcome, RunStatus, SweepPlace
from mingpt_ddp.errors import ConfigError, JobError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.exit import FAILURE, USER_ERROR
from mingpt_ddp.process.root_cause import failed
from mingpt_ddp.study.sweeps.sweep import Sweep

ENDS = {
    "crash": failed(JobError("crashed"), FAILURE),
    "mistake": failed(ConfigError("a mistake")),
    "complete": Outcome(RunStatus.COMPLETE, value=1.0),
}


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        (["mistake"], USER_ERROR),
        (["crash"], FAILURE),
        (["crash", "mistake"], USER_ERROR),
        (["mistake", "crash"], FAILURE),
        (["crash", "complete"], USER_ERROR),  # the other job's
    ],
)
def test_the_last_attempt_of_each_job_decides(attempts, code, tmp_path):
    config = typed(configure(f"run.root={tmp_path}"))
    sweep = Sweep(env=DistEnv(), config=config, directory=tmp_path, planned=2)
    sweep.record(SweepPlace(1, "another job"), ENDS["mistake"])
    for end in attempts:
        sweep.failed.pop(0, None)  # as a retry does
        sweep.record(SweepPlace(0, "a job"), replace(ENDS[end], directory=tmp_path / "job"))
    outcome = sweep.finish()
    assert (outcome.exit_code, type(outcome.error)) == (code, JobError)
