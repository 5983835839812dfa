"""Replicates: jobs that differ in run.seed alone are one recipe."""

from __future__ import annotations

import pytest
from fake_runs import fake_run

from mingpt_ddp.results.groups import best_group, has_replicates, replicates
from mingpt_ddp.results.runs import read_jobs, varying
from mingpt_ddp.results.stats.intervals import Estimate


def groups_in(path):
    return replicates(read_jobs([path]))


def seeds(path, lr, losses, first=1, status="complete", **values):
    """Write a run for each loss, with the seeds first, first + 1, ..."""
    for seed, loss in enumerate(losses, start=first):
        config = {"optimizer.lr": lr, "run.seed": seed, **values}
        name = f"optimizer.lr={lr},run.seed={seed}-{seed:08x}"
        fake_run(path / name, config, status, loss)


def test_jobs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    seeds(tmp_path, 0.1, [1.0, 3.0, 2.0])
    seeds(tmp_path, 0.2, [2.0, 2.2])
    best, other = groups_in(tmp_path)
    assert best.name == "optimizer.lr=0.1,run.seed=*-*"
    assert other.name == "optimizer.lr=0.2,run.seed=*-*"
    assert (best.estimate.n, best.estimate.mean) == (3, pytest.approx(2.0))
    assert (other.estimate.n, other.estimate.mean) == (2, pytest.approx(2.1))


def test_the_best_group_has_the_lowest_mean_not_the_luckiest_seed(tmp_path):
    seeds(tmp_path, 0.1, [1.0, 3.0])
    seeds(tmp_path, 0.2, [1.8, 1.9])
    groups = groups_in(tmp_path)
    assert [group.config["optimizer.lr"] for group in groups] == [0.2, 0.1]
    assert best_group(groups) is groups[0]
    assert has_replicates(groups)


def test_the_seed_is_no_parameter_of_a_group(tmp_path):
    seeds(tmp_path, 0.1, [1.0, 3.0])
    seeds(tmp_path, 0.2, [2.0, 2.2], first=7)
    assert varying(read_jobs([tmp_path])) == ["run.seed", "optimizer.lr"]
    assert varying(groups_in(tmp_path)) == ["optimizer.lr"]


def test_no_replicates(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 0.1, "run.seed": 1})
    fake_run(tmp_path / "b", {"optimizer.lr": 0.2, "run.seed": 2}, val_loss=1.0)
    groups = groups_in(tmp_path)
    assert not has_replicates(groups)
    assert [(group.name, group.estimate.n, group.estimate.deviation) for group in groups] == [
        ("b", 1, None),
        ("a", 1, None),
    ]


def test_storage_and_operation_do_not_make_another_recipe(tmp_path):
    fake_run(tmp_path / "a", {"run.seed": 1, "run.root": "x", "ddp.nproc_per_node": 1})
    fake_run(tmp_path / "b", {"run.seed": 2, "run.root": "y", "ddp.nproc_per_node": 4})
    assert [len(group.jobs) for group in groups_in(tmp_path)] == [2]


def test_a_swept_key_of_operation_is_a_parameter(tmp_path):
    """Jobs of one seed that differ in it are no replicates: somebody compares them."""
    for strategy in ("ddp", "fsdp"):
        for seed in (1, 2):
            values = {"run.seed": seed, "ddp.strategy": strategy}
            fake_run(tmp_path / f"{strategy}{seed}", values)
    groups = groups_in(tmp_path)
    assert [len(group.jobs) for group in groups] == [2, 2]
    assert varying(groups) == ["ddp.strategy"]


def test_a_seed_that_was_run_twice_is_no_sweep(tmp_path):
    for seed in (1, 2, 3):
        fake_run(tmp_path / f"{seed}", {"run.seed": seed})
    fake_run(tmp_path / "again", {"run.seed": 1, "tracker.mlflow": True})
    (group,) = groups_in(tmp_path)
    assert (len(group.jobs), group.seeds) == (4, 3)


@pytest.mark.parametrize("value", ["never", "outputs/other"])
def test_weights_of_another_run_are_another_recipe(tmp_path, value):
    """A new directory for the same training is not."""
    fake_run(tmp_path / "a", {"run.seed": 1, "run.resume": "auto"})
    fake_run(tmp_path / "b", {"run.seed": 2, "run.resume": value})
    assert len(groups_in(tmp_path)) == (1 if value == "never" else 2)


@pytest.mark.parametrize(
    "key", ["trainer.max_steps", "trainer.eval_steps", "ddp.comm_hook", "data.path", "model.mine"]
)
def test_keys_that_make_the_numbers_separate_recipes(tmp_path, key):
    code = {"model.code": "mine.py"}  # whose keys are not known here
    fake_run(tmp_path / "a", {**code, "run.seed": 1, key: 7})
    fake_run(tmp_path / "b", {**code, "run.seed": 2, key: 8})
    assert len(groups_in(tmp_path)) == 2


def test_a_repeated_seed_counts_once(tmp_path):
    """Two runs of one seed are no independent samples."""
    for name, seed, loss in (("a", 1, 1.0), ("a-2", 1, 1.2), ("b", 2, 3.0)):
        fake_run(tmp_path / name, {"run.seed": seed}, val_loss=loss)
    (group,) = groups_in(tmp_path)
    assert len(group.jobs) == 3
    assert (group.estimate.n, group.estimate.mean) == (2, pytest.approx(2.05))
    only = replicates(group.jobs[:2])
    assert not has_replicates(only)


def test_incomplete_jobs_are_not_in_the_mean(tmp_path):
    seeds(tmp_path, 0.1, [2.0, 2.2])
    seeds(tmp_path, 0.1, [9.0], first=3, status="preempted")
    seeds(tmp_path, 0.2, [1.0, 1.0], status="running")
    seeds(tmp_path, 0.3, [None], status=None)
    done, going, nothing = groups_in(tmp_path)
    assert (done.complete, len(done.jobs), done.objective) == (2, 3, pytest.approx(2.1))
    assert (going.complete, going.estimate, going.value) == (0, Estimate(), pytest.approx(1.0))
    assert (nothing.value, nothing.latest) == (None, Estimate())


def test_a_job_without_a_configuration_is_alone(tmp_path):
    for name in ("a", "b"):
        (fake_run(tmp_path / name) / "config.yaml").unlink()
    assert len(groups_in(tmp_path)) == 2


def test_a_job_without_a_seed_is_a_sample_of_its_own(tmp_path):
    for name in ("a", "b"):
        config = fake_run(tmp_path / name) / "config.yaml"
        config.write_text("optimizer: {lr: 1}")
    (group,) = groups_in(tmp_path)
    assert group.estimate.n == 2


def test_directories_of_no_pattern_are_named_by_the_first(tmp_path):
    fake_run(tmp_path / "lucky", {"run.seed": 1}, val_loss=1.0)
    fake_run(tmp_path / "other", {"run.seed": 2}, val_loss=2.0)
    assert groups_in(tmp_path)[0].name == "lucky"
