"""Which jobs of a sweep are left, and how often each may start."""

from __future__ import annotations

import json

import pytest

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.distributed.exit import USER_ERROR
from mingpt_ddp.errors import RunError
from mingpt_ddp.storage import records as storage_records
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.progress import attempts, jobs_left
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.trials import Trials
from mingpt_ddp.sweeps.sources import Source
from mingpt_ddp.sweeps.sweep import Sweep
from tests.unit.sweeps.studies import open_study


def test_a_job_that_is_tried_again_has_not_failed_meanwhile():
    """Otherwise no other job would start next to it."""
    sweep = Sweep(settings=SweepConfig(retries=1, max_failures=0))
    tries = attempts(sweep, 1)
    next(tries)
    sweep.failed[1] = "optimizer.lr=2"
    assert sweep.has_too_many_failures
    next(tries)
    assert not sweep.has_too_many_failures
    assert next(tries, "end") == "end"


def test_failed_jobs_with_the_same_values_all_count():
    """Otherwise the sweep would say that some have not started, and start too many."""
    sweep = Sweep(settings=SweepConfig(max_failures=1), planned=2)
    for number in range(2):
        sweep.record_failed(Job(number, "optimizer.lr=2"), "a reason", USER_ERROR)
    assert sweep.is_over and sweep.has_too_many_failures


@pytest.mark.parametrize("threads", [10**6, 10**11])
def test_threads_that_torch_cannot_start_are_not_kept(tmp_path, threads):
    (tmp_path / "sweep.json").write_text(json.dumps({"threads": {"1": threads}, "cores": threads}))
    file = SweepFile(tmp_path)
    assert file.cores is None
    assert file.threads(1, 2) == 2
    assert SweepFile(tmp_path).threads(1, 3) == 2


def test_failures_of_earlier_starts_count(tmp_path):
    study = open_study(tmp_path)
    study.values(0)
    study.fail(0, "a reason")
    settings = SweepConfig(sampler="random", retries=1)
    trials = Trials(open_study(tmp_path, retries=1), settings, [], tmp_path)
    assert not trials.is_settled(0, {})
    source = Source(2, trials.overrides, frozenset(), has_study=True, trials=trials)
    tries = attempts(Sweep(settings=settings, source=source), 0)
    next(tries)
    trials.fail(0, "a reason")
    assert next(tries, "end") == "end"
    assert trials.is_settled(0, {})


@pytest.mark.parametrize("has_file", [True, False])
def test_a_job_is_done_at_the_limits_that_it_has_reached_itself(tmp_path, has_file):
    """Whatever a start with fewer trials has reached, and with or without sweep.json."""
    study = open_study(tmp_path)
    for number, steps in enumerate((6, 4)):
        study.values(number)
        study.finish(number, TrialState.COMPLETE, [1.0], f"job-{number}")
        job = tmp_path / f"job-{number}"
        job.mkdir()
        (job / "config.yaml").write_text(f"trainer: {{max_steps: {steps}, max_epochs: null}}")
        (job / "result.json").write_text(json.dumps({"status": "complete", "val_loss": 1.0}))
    if has_file:
        (tmp_path / "sweep.json").write_text(json.dumps({"limits": {"max_steps": 6}}))
    trials = Trials(open_study(tmp_path), SweepConfig(sampler="random"), [], tmp_path)
    source = Source(2, trials.overrides, frozenset(), has_study=True, trials=trials)
    limits = {"max_epochs": None, "max_minutes": None, "patience": None}
    for steps, left in ((4, []), (6, [1]), (8, [0, 1])):
        sweep = Sweep(source=source, limits={**limits, "max_steps": steps})
        assert [*jobs_left(sweep, source)] == left, steps
        assert len(sweep.done) == 2 - len(left)


def test_more_failures_than_could_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_records, "MAX_JSON_BYTES", 1000)
    file = SweepFile(tmp_path)
    file.keep_cores(2)
    with pytest.raises(RunError, match="cannot record cores, failures: it has 1,"):
        for number in range(100):
            file.fail(f"a={number}", "a", "it failed")
    assert SweepFile(tmp_path).cores == 2 and SweepFile(tmp_path).failures
