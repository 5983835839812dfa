"""Which jobs of a sweep end early, by what earlier jobs have measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.hydra_utils import config_directory
from mingpt_ddp.metrics.jsonl import METRICS
from mingpt_ddp.training.trial_pruning import MIN_JOBS, MedianPruner


class OneRank:
    """As much of a runtime as the pruner needs."""

    @property
    def group(self):
        return self

    def run_on_rank_zero(self, work):
        return work()


@pytest.fixture(scope="module")
def config() -> Config:
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        words = ["run.name=sweep/own", "trainer.prune=median", "trainer.prune_after=20"]
        return from_mapping(to_plain(compose("config", words)))


def job(directory: Path, began: float, losses: dict[int, float]) -> Path:
    """A job that began at that second and has measured these validation losses, by step."""
    directory.mkdir(parents=True)
    records = [{"start": began, "step": 0}, *({"step": step, "val_loss": loss} for step, loss in losses.items())]
    (directory / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


@pytest.fixture
def pruner(config, tmp_path):
    """The pruner of a job with five siblings, with 2, 3, 4, 5 and 6 as their lowest losses up to step 20."""
    for number in range(MIN_JOBS):
        job(tmp_path / f"job{number}", number, {10: 9.0, 20: 2.0 + number, 30: 0.5})
    return MedianPruner(config, OneRank(), job(tmp_path / "own", 100, {}))


def test_the_median_decides(pruner):
    assert pruner.should_prune(20, 4.001)
    assert not pruner.should_prune(20, 4.0), "as good as the median is good enough"
    assert pruner.should_prune(30, 0.6), "the others have found less since"


def test_a_job_s_lowest_loss_counts_not_its_last(pruner, tmp_path):
    job(tmp_path / "overfitted", 50, {10: 1.0, 20: 99.0})
    job(tmp_path / "overfitted too", 51, {10: 1.0, 20: 99.0})
    assert pruner.should_prune(20, 3.001)
    assert not pruner.should_prune(20, 3.0)


def test_no_job_is_pruned_before_prune_after(pruner):
    assert not pruner.should_prune(19, 99.0)


def test_too_few_jobs_are_nothing_to_compare_with(pruner, tmp_path):
    (tmp_path / "job0" / METRICS).unlink()
    assert not pruner.should_prune(20, 99.0)
    job(tmp_path / "slow", 50, {10: 9.0})
    assert not pruner.should_prune(20, 99.0), "it has not got so far"


def test_jobs_that_began_later_do_not_count(pruner, tmp_path):
    """A job that has failed and is tried again must not be judged by those that came after it."""
    for number in range(5):
        job(tmp_path / f"later{number}", 101, {20: 0.1})
    assert not pruner.should_prune(20, 4.0)


def test_what_cannot_be_read_does_not_count(pruner, tmp_path):
    (tmp_path / "notes.txt").write_text("no job")
    (tmp_path / "job0" / METRICS).write_text("no history\nat all\n")
    assert not pruner.should_prune(20, 99.0)
    job(tmp_path / "another", 50, {20: 2.0})
    assert pruner.should_prune(20, 4.001)


@pytest.mark.parametrize(("name", "prune"), [("own", "median"), (None, "median"), ("sweep/own", "none")])
def test_nothing_is_pruned_outside_a_sweep_or_where_pruning_is_off(name, prune, pruner, config):
    run = dataclasses.replace(config.run, name=name)
    trainer = dataclasses.replace(config.trainer, prune=prune)
    other = dataclasses.replace(config, run=run, trainer=trainer)
    assert not MedianPruner(other, OneRank(), pruner.directory).should_prune(20, 99.0)


def test_pruning_is_no_part_of_the_config_hash(config):
    off = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, prune="none", prune_after=7))
    assert off.digest() == config.digest()
