"""Interrupted searches by Optuna end like an uninterrupted one, and train nothing twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from launching import TINY, Job, call, python_main, torchrun, wait_for

from mingpt_ddp.metrics.jsonl import METRICS, read_history

SEARCH = ["-m", "sweep=optuna_lr", *TINY, "model.n_layer=1", "data.truncate=0.01"]
SHORT = [*SEARCH, "trainer.max_steps=4", "trainer.eval_every=2", "snapshot.every_steps=2"]
PRUNING = [*SHORT, "trainer.prune=median", "trainer.prune_after=2"]
DIRECTORY = Path("outputs", "optuna_lr")

try:
    is_installed = version("hydra-optuna-sweeper") and version("sqlalchemy").startswith("1.")
except PackageNotFoundError:
    is_installed = False
needs_optuna = pytest.mark.skipif(not is_installed, reason="needs pip install 'mingpt_ddp[sweep]'")


def study(directory: Path) -> list[tuple[str, dict[str, float], float | None]]:
    """Read state, parameters and objective of every trial from the study file."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    stored = optuna.load_study(study_name="optuna_lr", storage=f"sqlite:///{directory}/study.db")
    return [(trial.state.name, trial.params, trial.value) for trial in stored.trials]


def objectives(directory: Path) -> dict[str, float]:
    """Return the objectives in the results of the jobs, by directory."""
    return {
        path.parent.name: json.loads(path.read_text())["val_loss"]
        for path in directory.glob("*/result.json")
    }


def statuses(directory: Path) -> dict[str, str]:
    return {
        path.parent.name: json.loads(path.read_text())["status"]
        for path in directory.glob("*/result.json")
    }


def starts(directory: Path) -> dict[str, int]:
    return {path.parent.name: read_history(path).starts for path in directory.glob(f"*/{METRICS}")}


def history_lines(directory: Path) -> int:
    """Return the number of lines in the histories of all jobs: the progress of the search."""
    return sum(len(path.read_bytes().splitlines()) for path in directory.glob(f"*/{METRICS}"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("uninterrupted")
    done = call([*python_main(), *PRUNING], cwd, timeout=240)
    assert done.returncode == 0, done.stdout
    return cwd / DIRECTORY


@pytest.mark.slow
@needs_optuna
@pytest.mark.timeout(600)
def test_a_search_killed_at_a_random_moment_equals_the_uninterrupted_one(uninterrupted, tmp_path):
    """Killed after the random startup trials; the same jobs are pruned."""
    directory, seed = tmp_path / DIRECTORY, 5
    kill_at = random.Random(seed).randint(70, history_lines(uninterrupted) - 10)
    print(f"seed {seed}: killed after line {kill_at} of the jobs' histories")
    job = Job([*python_main(), *PRUNING], tmp_path)
    wait_for(lambda: history_lines(directory) >= kill_at, timeout=200, what=f"line {kill_at}")
    job.kill_tree()
    finished = set(objectives(directory))
    assert 10 < len(finished) < 20
    job = Job([*python_main(), *PRUNING], tmp_path)
    assert job.wait(240) == 0, job.text()
    assert f"sweep: 20 jobs, {len(finished)} already complete, 0 failed" in job.text()

    trials = study(directory)
    assert len(trials) == 20
    assert trials == study(uninterrupted)
    assert sorted(value for _, _, value in trials) == sorted(objectives(directory).values())
    best = min(value for _, _, value in trials)
    assert f"best_value: {best}" in (directory / "optimization_results.yaml").read_text()
    assert {
        name: count for name, count in starts(directory).items() if name in finished
    } == dict.fromkeys(finished, 1)
    assert sum(starts(directory).values()) <= 21
    assert statuses(directory) == statuses(uninterrupted)
    assert 0 < list(statuses(directory).values()).count("pruned") < 15
    optuna_lines = [
        line
        for line in job.text().splitlines()
        if "optuna" in line.lower().replace("optuna_lr", "")
    ]
    assert not optuna_lines


@pytest.mark.slow
@needs_optuna
def test_pruned_jobs_resume_without_pruning(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / DIRECTORY)
    before = statuses(uninterrupted)
    # the startup trials: independent of the results of the others
    overrides = ["hydra.sweeper.n_trials=10"]
    done = call([*python_main(), *SHORT, *overrides], tmp_path)
    assert done.returncode == 0, done.stdout
    retrained = [name for name, count in starts(tmp_path / DIRECTORY).items() if count > 1]
    assert f"sweep: 10 jobs, {10 - len(retrained)} already complete, 0 failed" in done.stdout
    assert retrained
    assert {before[name] for name in retrained} == {"pruned"}
    assert done.stdout.count("resuming from the snapshot of step 2 of 4") == len(retrained)
    assert {statuses(tmp_path / DIRECTORY)[name] for name in retrained} == {"complete"}


@needs_optuna
@pytest.mark.slow
def test_two_ranks_in_lockstep_or_below_one_parent(tmp_path):
    """Killed, or preempted, while the second of two jobs trains.

    Both launches give the same study.
    """
    overrides = ["hydra.sweeper.n_trials=2", "trainer.max_steps=40", "trainer.eval_every=20"]
    launches = {
        "in_step": ([*torchrun(2), *SEARCH, *overrides], lambda job: job.kill_tree()),
        "parent": (
            [*python_main(), *SEARCH, *overrides, "ddp.nproc_per_node=2"],
            lambda job: job.process.terminate(),
        ),
    }
    trials_by_launch = {}
    for launch, (command, interrupt) in launches.items():
        cwd = tmp_path / launch
        cwd.mkdir()
        job = Job(command, cwd)
        wait_for(
            lambda: history_lines(cwd / DIRECTORY) > 44 + 4,  # noqa: B023
            timeout=200,
            what="the second job",
        )
        interrupt(job)
        assert job.wait() == (0 if launch == "parent" else -signal.SIGKILL), job.text()
        assert sum(status == "complete" for status in statuses(cwd / DIRECTORY).values()) == 1
        job = Job(command, cwd)
        assert job.wait() == 0, job.text()
        assert "sweep: 2 jobs, 1 already complete, 0 failed" in job.text()
        assert sorted(starts(cwd / DIRECTORY).values()) == [1, 2]
        trials_by_launch[launch] = study(cwd / DIRECTORY)
    assert trials_by_launch["in_step"] == trials_by_launch["parent"]
    assert [state for state, _, _ in trials_by_launch["parent"]] == ["COMPLETE"] * 2


@needs_optuna
@pytest.mark.slow
def test_a_search_over_tokenizers_minimizes_bits_per_byte(tmp_path):
    """Also of the jobs that are complete when the search is resumed."""
    command = [
        *python_main(),
        *SHORT,
        "hydra.sweeper.n_trials=4",
        "data.tokenizer=choice(char,byte)",
        "hydra.sweeper.sampler.seed=2",
    ]
    for complete in (0, 4):
        done = call(command, tmp_path)
        assert f"sweep: 4 jobs, {complete} already complete, 0 failed" in done.stdout, done.stdout
        trials = study(tmp_path / DIRECTORY)
        assert {params["data.tokenizer"] for _, params, _ in trials} == {"char", "byte"}
        results = [
            json.loads(path.read_text()) for path in (tmp_path / DIRECTORY).glob("*/result.json")
        ]
        assert sorted(value for _, _, value in trials) == sorted(
            result["bits_per_byte"] for result in results
        )


@needs_optuna
def test_a_failed_trial_does_not_end_the_search_and_is_retried(tmp_path):
    """Some learning rates make the loss non-finite."""
    command = [
        *python_main(),
        *SHORT,
        "hydra.sweeper.n_trials=4",
        "optimizer.lr=tag(log,interval(1e-8,1e30))",
    ]
    for attempt in (1, 2):
        done = call(command, tmp_path)
        assert done.returncode == 2, done.stdout
        trials = study(tmp_path / DIRECTORY)
        states = [state for state, _, _ in trials]
        failed = states.count("FAIL")
        assert (len(trials), failed + states.count("COMPLETE")) == (4, 4)
        assert 0 < failed < 4
        assert (
            f"sweep: 4 jobs, {(attempt - 1) * (4 - failed)} already complete, {failed} failed"
            in done.stdout
        )
        assert sorted(starts(tmp_path / DIRECTORY).values()) == sorted(
            [1] * (4 - failed) + [attempt] * failed
        )
        assert [value for state, _, value in trials if state == "FAIL"] == [None] * failed
        assert "Traceback" not in done.stdout


@needs_optuna
def test_a_search_whose_trials_all_fail(tmp_path):
    command = [
        *python_main(),
        *SHORT,
        "hydra.sweeper.n_trials=2",
        "optimizer.lr=tag(log,interval(1e29,1e30))",
    ]
    done = call(command, tmp_path)
    assert done.returncode == 2
    assert "sweep: 2 jobs, 0 already complete, 2 failed" in done.stdout
    assert "config error" not in done.stdout


def test_without_the_plugin_one_line_names_the_package_to_install(tmp_path):
    """A Python that finds all installed packages except the plugin."""
    site = tmp_path / "site"
    (site / "hydra_plugins").mkdir(parents=True)
    for folder in map(Path, dict.fromkeys([sysconfig.get_path("purelib"), *sys.path])):
        if folder.name == "site-packages" and folder.is_dir():
            for path in [*folder.iterdir(), *folder.glob("hydra_plugins/*")]:
                link = site / path.relative_to(folder)
                if "optuna" not in path.name and not link.exists():
                    link.symlink_to(path)
    (tmp_path / "cwd").mkdir()
    command = [sys.executable, "-S", *python_main()[1:], *SEARCH]
    done = call(command, tmp_path / "cwd", PYTHONPATH=str(site))
    expected = (
        "config error: hydra/sweeper/optuna is not installed; pip install 'mingpt_ddp[sweep]'\n"
    )
    assert (done.returncode, done.stdout) == (2, expected)
    assert os.listdir(tmp_path / "cwd") == []
