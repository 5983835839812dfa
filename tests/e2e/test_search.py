"""Check that interrupted Optuna searches end like undisturbed ones, and train nothing twice."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import sysconfig
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import Job, call, python_main, torchrun, wait_for
from runs import fail, succeed
from searching import (
    DIRECTORY,
    SEARCH,
    content,
    history_lines,
    recorded,
    results,
    starts,
    states,
    statuses,
    trials,
    weights,
)

needs_optuna = pytest.mark.skipif(
    find_spec("optuna") is None, reason="needs pip install 'mingpt_ddp[sweep]'"
)
MEDIAN = ["sweep.pruner=median", "sweep.pruner_settings={n_startup_trials: 3}"]
ASHA = ["sweep.pruner=asha"]


def search(*overrides: str) -> list[str]:
    return [*python_main(), *SEARCH, *overrides]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Run a search of twelve trials, of which the first ten are random. Return its directory."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    text = succeed(search("sweep.trials=12", *MEDIAN), cwd)
    count = Counter(states(cwd / DIRECTORY))
    assert count.keys() == {"COMPLETE", "PRUNED"} and count.total() == 12
    ended = f"sweep: 12 jobs, 0 already complete, 0 failed, {count['PRUNED']} pruned"
    assert ended in text
    return cwd / DIRECTORY


@needs_optuna
def test_a_search_killed_at_a_random_moment_equals_the_undisturbed_one(undisturbed, tmp_path):
    directory = tmp_path / DIRECTORY
    seed = random.randrange(10**6)
    kill_at = random.Random(seed).randint(20, history_lines(undisturbed) - 10)
    print(f"seed {seed}: killed after line {kill_at} of the jobs' histories")
    command = search("sweep.trials=12", *MEDIAN)
    job = Job(command, tmp_path)
    wait_for(lambda: history_lines(directory) >= kill_at, what=f"line {kill_at}")
    job.kill_tree()
    finished = set(results(directory))
    assert len(finished) < 12
    text = succeed(command, tmp_path)
    assert f"sweep: 12 jobs, {len(finished)} already complete, 0 failed" in text
    assert recorded(directory) == recorded(undisturbed)
    assert weights(directory) == weights(undisturbed)
    assert statuses(directory) == statuses(undisturbed)
    again = {name: count for name, count in starts(directory).items() if count > 1}
    assert not finished & again.keys(), "a finished job was trained again"
    assert sum(again.values()) <= 2
    optuna_lines = [
        line for line in text.splitlines() if "optuna" in line.lower().replace("optuna_lr", "")
    ]
    assert not optuna_lines
    before = content(directory)
    text = succeed(command, tmp_path)
    assert "sweep: 12 jobs, 12 already complete, 0 failed" in text
    derived = {"report.html", "multirun.yaml", ".lock"}
    changed = {path for path, file in content(directory).items() if before.get(path) != file}
    assert changed <= derived


@needs_optuna
def test_more_trials_continue_a_search(undisturbed, tmp_path):
    directory = tmp_path / DIRECTORY
    shutil.copytree(undisturbed, directory)
    text = succeed(search("sweep.trials=13", *MEDIAN), tmp_path)
    assert "sweep: 13 jobs, 12 already complete, 0 failed" in text
    assert recorded(directory)[:12] == recorded(undisturbed)
    assert set(starts(directory).values()) == {1}


REFUSED = {
    "another space": (
        ["optimizer.lr=tag(log,interval(1e-4,1e-3))"],
        'optimizer.lr="tag(log,interval(0.0001,0.001))" was "tag(log,interval(0.0001,0.01))"',
    ),
    "a searched key is fixed": (
        ["optimizer.lr=1e-3"],
        'optimizer.lr=not set was "tag(log,interval(0.0001,0.01))"',
    ),
    "another key": (["model.dropout=interval(0,0.5)"], "model.dropout="),
    "another fixed value": (["model.n_embd=48"], "model.n_embd=48 was 24 when the search"),
    "another length": (
        ["trainer.max_steps=6"],
        "trainer.max_steps=6 was 4 when the search",
    ),
    "another seed": (["sweep.seed=2"], "sweep.seed=2 was 1"),
    "another metric": (["sweep.metric=train_loss"], 'sweep.metric="train_loss" was "val_loss"'),
    "trained again": (["run.resume=never"], "run.resume=never would train jobs again"),
}


@needs_optuna
def test_another_search_is_refused(undisturbed, tmp_path):
    """The error is one line, and no file changes."""
    directory = tmp_path / DIRECTORY
    shutil.copytree(undisturbed, directory)
    before = content(tmp_path)
    for case, (overrides, reason) in REFUSED.items():
        text = fail(search("sweep.trials=12", *overrides), tmp_path)
        (line,) = text.splitlines()
        assert line.startswith("config error: ") and reason in line, (case, line)
        assert content(tmp_path).items() - before.items() <= locks(tmp_path), case


def locks(cwd: Path) -> set[tuple[str, bytes]]:
    return {(path, file) for path, file in content(cwd).items() if path.endswith("/.lock")}


@needs_optuna
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_lost_journal_beside_jobs_that_have_ended_is_refused(is_empty, undisturbed, tmp_path):
    """A new search would train other jobs in the same directory."""
    shutil.copytree(undisturbed, tmp_path / DIRECTORY)
    journal = tmp_path / DIRECTORY / "study.journal"
    journal.write_text("") if is_empty else journal.unlink()
    before = content(tmp_path)
    text = fail(search("sweep.trials=12", *MEDIAN), tmp_path)
    (line,) = text.splitlines()
    assert line.endswith(
        "study.journal is missing or empty, but its search has 12 ended jobs; restore the "
        "file, or choose another run.name"
    )
    assert content(tmp_path).items() - before.items() <= locks(tmp_path)


@needs_optuna
@pytest.mark.parametrize("ranks", [pytest.param("lock-step", marks=pytest.mark.slow), "one parent"])
def test_an_interrupted_search_on_two_ranks(ranks, two_ranks, tmp_path):
    """The search is killed or preempted while a job trains. Both ways give the same results."""
    overrides = [*ASHA, "sweep.trials=4", "sweep.seed=3"]
    commands = {
        "lock-step": [*torchrun(2), *SEARCH, *overrides],
        "one parent": search(*overrides, "ddp.nproc_per_node=2"),
    }
    directory = tmp_path / DIRECTORY
    job = Job(commands[ranks], tmp_path)
    wait_for(lambda: history_lines(directory) > 15, what="the second job")
    if ranks == "lock-step":
        job.kill_tree()
    else:
        job.process.send_signal(signal.SIGTERM)
        # The exit code is 143 if the signal came after the last step of a job, when nothing is left
        # to save.
        assert job.wait() in (0, 128 + signal.SIGTERM), job.text()
    assert len(statuses(directory)) < 4
    text = succeed(commands[ranks], tmp_path)
    assert "sweep: 4 jobs, " in text
    assert recorded(directory) == recorded(two_ranks)
    assert weights(directory) == weights(two_ranks)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Run an undisturbed search on two ranks. Return its directory."""
    cwd = tmp_path_factory.mktemp("two_ranks")
    overrides = [*ASHA, "sweep.trials=4", "sweep.seed=3"]
    succeed([*torchrun(2), *SEARCH, *overrides], cwd)
    assert "PRUNED" in states(cwd / DIRECTORY)
    return cwd / DIRECTORY


@needs_optuna
def test_a_failed_trial_stays_failed(tmp_path):
    """Other trials are not affected. sweep.retries restarts a trial before it counts as failed."""
    command = search("sweep.trials=4", "optimizer.lr=tag(log,interval(1e-8,1e30))")
    directory = tmp_path / DIRECTORY
    text = fail(command, tmp_path)
    first = trials(directory)
    count = Counter(states(directory))
    assert count == {"COMPLETE": 4 - count["FAIL"], "FAIL": count["FAIL"]} and 0 < count["FAIL"] < 4
    failed = count["FAIL"]
    assert f"sweep: 4 jobs, 0 already complete, {failed} failed" in text
    assert text.count("\ntraining error: ") == failed
    assert "failed trials do not start again; raise sweep.trials to try other values" in text
    assert "Traceback" not in text

    again = fail(command, tmp_path)
    assert f"sweep: 4 jobs, {4 - failed} already complete, {failed} failed" in again
    assert again.count(" has failed before: training error: ") == failed
    assert set(starts(directory).values()) == {1}
    assert trials(directory) == first

    other = tmp_path / "other"
    other.mkdir()
    retried = fail([*command, "sweep.retries=1"], other)
    assert retried.count("\ntraining error: ") == 2 * failed
    assert trials(other / DIRECTORY) == first
    assert sorted(starts(other / DIRECTORY).values()) == sorted([1] * (4 - failed) + [2] * failed)


@needs_optuna
def test_a_search_in_which_all_trials_fail(tmp_path):
    """Optuna has no value to learn from. After sweep.max_failures, no other trial starts."""
    command = search(
        "sweep.trials=4", "sweep.max_failures=1", "optimizer.lr=tag(log,interval(1e29,1e30))"
    )
    text = fail(command, tmp_path)
    assert "sweep: 2 jobs, 0 already complete, 2 failed" in text
    assert "\nno other job starts, because 2 jobs failed (sweep.max_failures=1)\n" in text
    assert "2 jobs did not start" in text
    assert "config error" not in text
    done = call([*command, "sweep.max_failures=null"], tmp_path)
    assert "sweep: 4 jobs, 0 already complete, 4 failed" in done.stdout
    assert states(tmp_path / DIRECTORY) == ["FAIL"] * 4


@needs_optuna
@pytest.mark.slow
def test_a_search_over_tokenizers_minimizes_bits_per_byte(tmp_path):
    """When the search is resumed, the complete jobs have bits per byte too."""
    command = search("sweep.trials=4", "sweep.seed=2", "data.tokenizer=choice(char,byte)")
    for complete in (0, 4):
        text = succeed(command, tmp_path)
        assert f"sweep: 4 jobs, {complete} already complete, 0 failed" in text
        found = trials(tmp_path / DIRECTORY)
        assert {values["data.tokenizer"] for _, values, _ in found} == {"char", "byte"}
        measured = [result["bits_per_byte"] for result in results(tmp_path / DIRECTORY).values()]
        assert sorted(values for _, _, values in found) == sorted([each] for each in measured)


def test_without_optuna_one_line_names_the_extra(tmp_path):
    """The Python of this test finds all installed packages except Optuna."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in map(Path, dict.fromkeys([sysconfig.get_path("purelib"), *sys.path])):
        if folder.name == "site-packages" and folder.is_dir():
            for path in folder.iterdir():
                link = site / path.name
                if "optuna" not in path.name and not link.exists():
                    link.symlink_to(path)
    (tmp_path / "cwd").mkdir()
    command = [sys.executable, "-S", *python_main()[1:], *SEARCH]
    done = call(command, tmp_path / "cwd", PYTHONPATH=str(site))
    expected = "config error: a search needs Optuna; run pip install 'mingpt_ddp[sweep]'\n"
    assert (done.returncode, done.stdout) == (2, expected)
    assert not list((tmp_path / "cwd").iterdir())
