"""Which jobs of a sweep are left, and how often each may start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.distributed.exit import USER_ERROR
from mingpt_ddp.errors import RunError
from mingpt_ddp.storage import sweep_file
from mingpt_ddp.storage.sweep_file import SweepFile, read_failures
from mingpt_ddp.sweeps.job import Job
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.trial_jobs import Trials
from mingpt_ddp.sweeps.sources import Source
from mingpt_ddp.sweeps.sweep import Sweep
from tests.unit.sweeps.studies import open_study


@pytest.fixture(scope="module")
def config() -> Config:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", ["run.name=sweep"])))


def open_sweep(directory, config: Config, total: int, **settings) -> Sweep:
    """Return a sweep of trials as a start finds it."""
    settings = SweepConfig(sampler="random", **settings)
    config = replace(config, sweep=settings)
    trials = Trials(open_study(directory), config, [], directory)
    source = Source(trials.overrides, frozenset({"kind"}), trials)
    file = SweepFile(directory)
    return Sweep(settings=settings, source=source, file=file, planned=total)


def fail(sweep: Sweep, number: int) -> None:
    sweep.record_failed(sweep.source.job(number), "a reason", USER_ERROR)


def test_a_job_that_is_tried_again_has_not_failed_meanwhile():
    """Otherwise no other job would start next to it."""
    sweep = Sweep(settings=SweepConfig(retries=1, max_failures=0))
    tries = sweep.attempts(1)
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


def test_failures_of_earlier_starts_count(tmp_path, config):
    fail(open_sweep(tmp_path, config, 1, retries=1), 0)
    assert open_study(tmp_path).state(0) == TrialState.RUNNING, "a retry is left"
    sweep = open_sweep(tmp_path, config, 1, retries=1)
    assert [*sweep.jobs_left(sweep.source)] == [0]
    tries = sweep.attempts(0)
    next(tries)
    fail(sweep, 0)
    assert next(tries, "end") == "end"
    for retries, left in ((1, []), (2, [0])):
        sweep = open_sweep(tmp_path, config, 1, retries=retries)
        assert open_study(tmp_path).state(0) == TrialState.FAIL
        assert [*sweep.jobs_left(sweep.source)] == left


def test_a_success_forgets_failures(tmp_path, config):
    """Of one retry, and none at the start after it: a kill does not take that for a failure."""
    sweep = open_sweep(tmp_path, config, 1, retries=1)
    fail(sweep, 0)
    job = tmp_path / "job-0"
    job.mkdir()
    (job / "result.json").write_text(json.dumps({"status": "complete", "val_loss": 1.0}))
    sweep.record_done(sweep.source.job(0), job)
    assert not sweep.failed and sweep.done == {0: job}
    sweep = open_sweep(tmp_path, config, 1)
    assert [*sweep.jobs_left(sweep.source)] == [0]
    sweep.trials.start(0)
    assert open_study(tmp_path).state(0) == TrialState.RUNNING


@pytest.mark.parametrize("has_file", [True, False])
def test_a_job_is_done_at_the_limits_that_it_has_reached_itself(tmp_path, config, has_file):
    """Whatever a start with fewer trials has reached, and with or without sweep.json."""
    study = open_study(tmp_path)
    for number, steps in enumerate((6, 4)):
        study.values(number)
        study.finish(number, TrialState.COMPLETE, 1.0, f"job-{number}")
        job = tmp_path / f"job-{number}"
        job.mkdir()
        (job / "config.yaml").write_text(f"trainer: {{max_steps: {steps}, max_epochs: null}}")
        (job / "result.json").write_text(json.dumps({"status": "complete", "val_loss": 1.0}))
    if has_file:
        (tmp_path / "sweep.json").write_text(json.dumps({"limits": {"max_steps": 6}}))
    for steps, left in ((4, []), (6, [1]), (8, [0, 1])):
        trainer = replace(config.trainer, max_epochs=None, max_steps=steps)
        sweep = open_sweep(tmp_path, replace(config, trainer=trainer), 2)
        assert [*sweep.jobs_left(sweep.source)] == left, steps
        assert len(sweep.done) == 2 - len(left)


def test_more_failures_than_could_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_file, "MAX_BYTES", 1000)
    file = SweepFile(tmp_path)
    with pytest.raises(RunError, match=r"cannot write .*failures\.jsonl: it is full"):
        for number in range(100):
            file.fail(f"a={number}", f"a-{number}", "it failed")
    assert 5 < len(read_failures(tmp_path)) < 20
