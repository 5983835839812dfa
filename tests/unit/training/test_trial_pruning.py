"""Pruning of jobs of a sweep by the validation losses of earlier jobs."""

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
    """The part of a runtime that the pruner uses."""

    @property
    def group(self):
        return self

    def run_on_rank_zero(self, work):
        return work()


@pytest.fixture(scope="module")
def config() -> Config:
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        overrides = ["run.name=sweep/own", "trainer.prune=median", "trainer.prune_after=20"]
        return from_mapping(to_plain(compose("config", overrides)))


def job(directory: Path, began: float, losses: dict[int, float], key: str = "val_loss") -> Path:
    """Write the records of a job with this start time and these validation losses by step."""
    directory.mkdir(parents=True)
    records = [
        {"start": began, "step": 0},
        *({"step": step, key: loss} for step, loss in losses.items()),
    ]
    (directory / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


@pytest.fixture
def pruner(config, tmp_path):
    """The pruner of a job with five earlier jobs, whose lowest losses up to step 20 are 2, 3, 4, 5
    and 6.
    """
    for number in range(MIN_JOBS):
        job(tmp_path / f"job{number}", number, {10: 9.0, 20: 2.0 + number, 30: 0.5})
    return MedianPruner(config, OneRank(), job(tmp_path / "own", 100, {}))


def test_the_median_decides(pruner):
    assert pruner.should_prune(20, 4.001)
    assert not pruner.should_prune(20, 4.0), "a loss equal to the median is not pruned"
    assert pruner.should_prune(30, 0.6), "the others have lower losses by then"


def test_the_lowest_loss_of_a_job_counts_not_its_last(pruner, tmp_path):
    job(tmp_path / "overfitted", 50, {10: 1.0, 20: 99.0})
    job(tmp_path / "overfitted too", 51, {10: 1.0, 20: 99.0})
    assert pruner.should_prune(20, 3.001)
    assert not pruner.should_prune(20, 3.0)


def test_no_job_is_pruned_before_prune_after(pruner):
    assert not pruner.should_prune(19, 99.0)


def test_no_pruning_with_too_few_jobs(pruner, tmp_path):
    (tmp_path / "job0" / METRICS).unlink()
    assert not pruner.should_prune(20, 99.0)
    job(tmp_path / "slow", 50, {10: 9.0})
    assert not pruner.should_prune(20, 99.0), "the job has not reached the step"


def test_a_job_that_is_evaluated_first_at_a_later_step_does_not_count(pruner, tmp_path):
    job(tmp_path / "rarely evaluated", 50, {25: 0.1, 50: 0.1})
    assert not pruner.should_prune(20, 4.0)
    assert pruner.should_prune(20, 4.001)


def test_jobs_that_started_later_do_not_count(pruner, tmp_path):
    """A failed job that is retried must not be compared with those that started after it."""
    for number in range(5):
        job(tmp_path / f"later{number}", 101, {20: 0.1})
    assert not pruner.should_prune(20, 4.0)


def test_unreadable_jobs_do_not_count(pruner, tmp_path):
    (tmp_path / "notes.txt").write_text("no job")
    (tmp_path / "job0" / METRICS).write_text("no history\nat all\n")
    assert not pruner.should_prune(20, 99.0)
    job(tmp_path / "another", 50, {20: 2.0})
    assert pruner.should_prune(20, 4.001)


@pytest.mark.parametrize(
    ("name", "prune"), [("own", "median"), (None, "median"), ("sweep/own", "none")]
)
def test_nothing_is_pruned_outside_a_sweep_or_with_pruning_off(name, prune, pruner, config):
    run = dataclasses.replace(config.run, name=name)
    trainer = dataclasses.replace(config.trainer, prune=prune)
    other = dataclasses.replace(config, run=run, trainer=trainer)
    assert not MedianPruner(other, OneRank(), pruner.directory).should_prune(20, 99.0)


def test_pruning_is_not_part_of_the_config_hash(config):
    off = dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, prune="none", prune_after=7)
    )
    assert off.digest() == config.digest()


def encoded(directory: Path, tokenizer: str) -> None:
    """Record the configuration of a job with this tokenizer."""
    (directory / "config.yaml").write_text(f"data: {{path: text, tokenizer: {tokenizer}}}")


def test_bits_per_byte_decide_between_tokenizers(config, tmp_path, caplog):
    """The last of five BPE jobs would be the worst of all by its loss, and is the best."""
    caplog.set_level("INFO", "mingpt_ddp")
    for number in range(MIN_JOBS):
        path = job(
            tmp_path / f"job{number}", number, {10: 9.0, 20: 2.0 + number}, "val_bits_per_byte"
        )
        encoded(path, "char")
    own = job(tmp_path / "own", 100, {10: 3.9, 20: 8.0}, "val_bits_per_byte")
    encoded(own, "bpe")
    assert not MedianPruner(config, OneRank(), own).should_prune(20, 99.0), (
        "3.9 at step 10 is below 4"
    )
    other = job(tmp_path / "other", 101, {10: 4.1}, "val_bits_per_byte")
    encoded(other, "bpe")
    assert MedianPruner(config, OneRank(), other).should_prune(20, 0.1)
    assert (
        "pruned at step 20: bits per byte 4.1000 is above the median 3.9500 of earlier jobs"
        in caplog.text
    )


def test_a_job_without_bits_per_byte_is_neither_pruned_nor_counted(config, tmp_path):
    for number in range(MIN_JOBS):
        encoded(
            job(tmp_path / f"job{number}", number, {20: 2.0 + number}, "val_bits_per_byte"), "char"
        )
    own = job(tmp_path / "own", 100, {20: 9.0})
    encoded(own, "byte")
    assert not MedianPruner(config, OneRank(), own).should_prune(20, 9.0)
    encoded(own, "char")
    assert not MedianPruner(config, OneRank(), own).should_prune(20, 9.0), (
        "no other job has recorded a loss"
    )


def test_jobs_of_one_tokenizer_are_compared_by_their_losses(pruner, tmp_path):
    for path in tmp_path.iterdir():
        encoded(path, "byte")
    assert pruner.should_prune(20, 4.001)
    assert not pruner.should_prune(20, 4.0)
