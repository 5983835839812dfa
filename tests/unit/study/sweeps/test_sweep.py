"""The exit code and the advice of a sweep with failed jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from multiprocess.ranks import configure, typed

from mingpt_ddp.config.job import Outcome, RunStatus, SweepPlace
from mingpt_ddp.errors import ConfigError, JobError, counted
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
        (["crash", "complete"], USER_ERROR),  # the exit code of the other job
    ],
)
def test_the_last_attempt_of_each_job_decides(attempts, code, tmp_path):
    config = typed(configure(f"run.root={tmp_path}"))
    sweep = Sweep(env=DistEnv(), config=config, directory=tmp_path, n_jobs=2)
    sweep.record(SweepPlace(1, "another job"), ENDS["mistake"])
    for end in attempts:
        sweep.failed.pop(0, None)  # a retry does the same
        sweep.record(SweepPlace(0, "a job"), replace(ENDS[end], directory=tmp_path / "job"))
    outcome = sweep.finish()
    assert (outcome.exit_code, type(outcome.error)) == (code, JobError)


RETRY = "rerun the same command to retry"
CORRECT = "correct the settings of the failed jobs"
BOTH = f"{RETRY}; a job with a config error needs other settings"


@pytest.mark.parametrize(
    ("ends", "n_jobs", "advice"),
    [
        (["crash"], 1, RETRY),
        (["mistake", "mistake"], 2, CORRECT),
        (["mistake", "crash"], 2, BOTH),
        (["mistake"], 3, f"2 jobs did not start; raise sweep.max_failures, or {CORRECT}"),
        (["crash"], 3, f"2 jobs did not start; raise sweep.max_failures, or {RETRY}"),
    ],
)
def test_a_retry_is_advised_only_if_it_may_help(ends, n_jobs, advice, tmp_path):
    """After a config error, the same command would fail again."""
    config = typed(configure(f"run.root={tmp_path}"))
    sweep = Sweep(env=DistEnv(), config=config, directory=tmp_path, n_jobs=n_jobs)
    for number, end in enumerate(ends):
        sweep.record(SweepPlace(number, f"job {number}"), ENDS[end])
    labels = "; ".join(f"job {number}" for number in range(len(ends)))
    assert str(sweep.finish().error) == (
        f"job error: {len(ends)} of {counted(len(ends), 'job')} failed: {labels}; {advice}"
    )
