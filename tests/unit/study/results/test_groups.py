"""Replicates are jobs that differ only in run.seed. They form one recipe."""

from __future__ import annotations

import pytest
from fake_runs import fake_run

from mingpt_ddp.study.results.groups import best_group, has_replicates, replicates
from mingpt_ddp.study.results.runs import read_jobs, varying
from mingpt_ddp.study.results.stats.intervals import Estimate


def groups_in(path):
    return replicates(read_jobs([path]))


def seeds(path, lr, losses, first=1, status="complete"):
    """Write a run for each loss. The seeds are first, first + 1 and so on."""
    for seed, loss in enumerate(losses, start=first):
        name = f"optimizer.lr={lr},run.seed={seed}-{seed:08x}"
        fake_run(path / name, {"optimizer.lr": lr, "run.seed": seed}, status, loss)


def test_the_best_group_has_the_lowest_mean_not_the_luckiest_seed(tmp_path):
    seeds(tmp_path, 0.1, [1.0, 3.0])
    seeds(tmp_path, 0.2, [1.8, 1.9], first=7)
    assert varying(read_jobs([tmp_path])) == ["run.seed", "optimizer.lr"]
    groups = groups_in(tmp_path)
    assert varying(groups) == ["optimizer.lr"], "the seed is no parameter of a group"
    assert [group.name for group in groups] == [
        f"optimizer.lr={lr},run.seed=*-*" for lr in (0.2, 0.1)
    ]
    assert [group.estimate.mean for group in groups] == pytest.approx([1.85, 2.0])
    assert best_group(groups) is groups[0] and has_replicates(groups)


CODE = {"model.code": "mine.py"}  # the keys of this code are unknown


@pytest.mark.parametrize(
    ("one", "other", "are_replicates"),
    [
        ({}, {}, True),
        ({"run.root": "x", "ddp.nproc_per_node": 1}, {"ddp.nproc_per_node": 4}, True),
        ({"ddp.strategy": "ddp"}, {"ddp.strategy": "fsdp"}, True),
        ({"run.resume": "auto"}, {"run.resume": "never"}, True),  # starts in a new directory
        # It starts from the weights of that run.
        ({"run.resume": "auto"}, {"run.resume": "outputs/other"}, False),
        ({}, {"trainer.max_steps": 7}, False),
        ({}, {"trainer.eval_steps": 7}, False),
        # Trackers, checks, evaluations and further texts do not change results.
        ({}, {"tracker.mlflow": True}, True),
        ({}, {"trainer.sample_every": 20}, True),
        ({}, {"trainer.eval_every": 7, "snapshot.every_steps": 7}, True),
        ({}, {"data.val_paths": {"wiki": "wiki.txt"}}, True),
        ({"trainer.patience": 2}, {"trainer.patience": 2, "trainer.eval_every": 7}, False),
        ({}, {"ddp.comm_hook": "bf16"}, False),
        ({}, {"data.path": "b.txt"}, False),
        ({**CODE, "model.mine": 7}, {**CODE, "model.mine": 8}, False),
    ],
    ids=str,
)
def test_keys_that_separate_recipes(tmp_path, one, other, are_replicates):
    fake_run(tmp_path / "a", {"run.seed": 1, **one})
    fake_run(tmp_path / "b", {"run.seed": 2, **other})
    groups = groups_in(tmp_path)
    assert len(groups) == (1 if are_replicates else 2)
    assert has_replicates(groups) is are_replicates


def test_a_swept_key_of_operation_is_a_parameter(tmp_path):
    """Jobs with equal seeds that differ in it are not replicates: the user compares them."""
    for strategy in ("ddp", "fsdp"):
        fake_run(tmp_path / f"{strategy}1", {"run.seed": 1, "ddp.strategy": strategy})
    assert len(groups_in(tmp_path)) == 1, "a seed that was run twice is no sweep"
    for strategy in ("ddp", "fsdp"):
        fake_run(tmp_path / f"{strategy}2", {"run.seed": 2, "ddp.strategy": strategy})
    groups = groups_in(tmp_path)
    assert [len(group.jobs) for group in groups] == [2, 2]
    assert varying(groups) == ["ddp.strategy"]


def test_a_repeated_seed_counts_once(tmp_path):
    """Two runs with the same seed are not independent samples."""
    for name, seed, loss in (("a", 1, 1.0), ("a-2", 1, 1.2), ("b", 2, 3.0)):
        fake_run(tmp_path / name, {"run.seed": seed}, val_loss=loss)
    (group,) = groups_in(tmp_path)
    assert (len(group.jobs), group.n_seeds, group.estimate.n) == (3, 2, 2)
    assert group.estimate.mean == pytest.approx(2.05)
    assert group.name == "a", "directories of no pattern are named by the first"
    assert not has_replicates(replicates(group.jobs[:2]))


def test_incomplete_jobs_are_not_in_the_mean(tmp_path):
    seeds(tmp_path, 0.1, [2.0, 2.2])
    seeds(tmp_path, 0.1, [9.0], first=3, status="preempted")
    seeds(tmp_path, 0.2, [1.0, 1.0], status="running")
    seeds(tmp_path, 0.3, [None], status=None)
    done, going, nothing = groups_in(tmp_path)
    assert (done.n_complete, len(done.jobs), done.objective) == (2, 3, pytest.approx(2.1))
    assert (going.n_complete, going.estimate, going.value) == (0, Estimate(), pytest.approx(1.0))
    assert (nothing.value, nothing.latest) == (None, Estimate())


def test_jobs_without_a_configuration_or_a_seed(tmp_path):
    """A job without a configuration has its own group. A job without a seed is its own sample."""
    for name in "abcd":
        config = fake_run(tmp_path / name) / "config.yaml"
        config.unlink() if name < "c" else config.write_text("optimizer: {lr: 1}")
    assert sorted(group.estimate.n for group in groups_in(tmp_path)) == [1, 1, 2]
