"""A study that is killed anywhere draws, prunes and ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import optuna
import pytest

from mingpt_ddp.config.sweep_config import SweepConfig
from mingpt_ddp.errors import ConfigError, RunError
from mingpt_ddp.sweeps.search.space import search_space
from mingpt_ddp.sweeps.search.study import Outcome, Study
from tests.unit.sweeps.studies import (
    SWEPT,
    cut_copy,
    lines_of,
    open_study,
    parse,
    run_all,
    run_job,
)

STARTUP = {"tpe": {"n_startup_trials": 3}, "gp": {"n_startup_trials": 3}}
SAMPLERS = ("tpe", "gp", "random")


def load(directory: Path, name: str = "") -> list[optuna.trial.FrozenTrial]:
    """Read the study as Optuna's own tools do; `name` is another than that of the directory."""
    backend = optuna.storages.journal.JournalFileBackend(str(directory / "study.journal"))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name=name or directory.name, storage=storage).trials


def check_agrees(directory: Path) -> None:
    """Check that Optuna reads what the records say."""
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": None}
    study = Study(
        directory,
        SweepConfig(sampler="random"),
        search_space(parse(*SWEPT)),
    )
    trials = load(directory)
    assert [trial.number for trial in trials] == list(range(len(study.trials())))
    for trial, record in zip(trials, study.trials(), strict=True):
        assert trial.params == record.params
        assert states[trial.state.name] == record.outcome
        reports = {step: each.value for step, each in record.reports.items()}
        assert trial.intermediate_values == reports
        assert trial.user_attrs.get("job", "") == record.job
        if record.outcome == "complete":
            assert trial.values == record.values


@pytest.mark.parametrize("pruner", ["median", "asha"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_cut_anywhere_ends_as_undisturbed(tmp_path, sampler, pruner):
    settings = {
        "sampler": sampler,
        "sampler_settings": STARTUP.get(sampler),
        "pruner": pruner,
        "pruner_settings": {"n_startup_trials": 2} if pruner == "median" else None,
    }
    trials = 6 if sampler == "gp" else 8
    whole = tmp_path / "whole" / "s"
    whole.mkdir(parents=True)
    run_all(open_study(whole, **settings), trials)
    expected = lines_of(whole)
    assert any(line.get("outcome") == "pruned" for line in expected)
    data = (whole / "trials.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    sizes = [0, *ends, *(end - 7 for end in ends[::3])]
    if sampler != "tpe":  # what the samplers share is checked once, and a draw of gp is slow
        sizes = sizes[:: len(sizes) // 6]
    for size in sizes:
        cut = cut_copy(whole, tmp_path / str(size) / "s", size)
        run_all(open_study(cut, **settings), trials)
        assert lines_of(cut) == expected, size
        check_agrees(cut)


def test_a_trial_is_drawn_from_the_results_that_there_are(tmp_path):
    """One that runs is none; one that has begun keeps its values, whatever ends meanwhile."""
    found = []
    for name, ends_first in (("a", False), ("b", True)):
        directory = tmp_path / name
        directory.mkdir()
        settings = {"sampler": "tpe", "sampler_settings": {"n_startup_trials": 1}}
        study = open_study(directory, parallel=2, **settings)
        run_all(study, 3)
        study.trial(3)
        if ends_first:
            study.finish(3, Outcome.COMPLETE, [0.0])
        drawn = study.trial(4).values
        if not ends_first:
            study.finish(3, Outcome.COMPLETE, [0.0])
        assert open_study(directory, parallel=2, **settings).trial(4).values == drawn
        found.append(drawn)
    assert found[0] != found[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_objectives(tmp_path, sampler):
    objectives = ("val_loss", "-accuracy")
    study = open_study(
        tmp_path, sampler=sampler, sampler_settings=STARTUP.get(sampler), objectives=objectives
    )
    run_all(study, 7)
    drawn = [study.trial(number).values for number in range(7)]
    again = open_study(
        tmp_path, sampler=sampler, sampler_settings=STARTUP.get(sampler), objectives=objectives
    )
    assert [again.trial(number).values for number in range(7)] == drawn
    assert all(len(again.values(number)) == 2 for number in range(7) if again.values(number))


def test_optuna_reads_the_study_after_each_change(tmp_path):
    directory = tmp_path / "a b?c%20#'d"
    directory.mkdir()
    study = open_study(directory, pruner="median")
    study.trial(0)
    check_agrees(directory)
    study.report(0, 5, 2.0)
    study.report(0, 6, float("nan"))
    study.finish(0, Outcome.COMPLETE, [float("nan")], job="job-0")
    study.trial(1)
    study.finish(1, Outcome.FAILED, reason="exit code 1", job="job-1")
    assert study.failures(1) == 1
    study.reopen(1)
    assert study.outcome(1) is None
    study.trial(2)
    study.finish(1, Outcome.COMPLETE, [float("-inf")], job="job-1")
    backup = directory.with_name("copy")
    backup.mkdir()
    name = "study.journal"
    (backup / name).write_bytes((directory / name).read_bytes())
    trials = load(backup, directory.name)
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "RUNNING"]
    assert trials[0].value == float("inf") and trials[0].user_attrs == {"job": "job-0"}
    assert trials[0].intermediate_values == {5: 2.0, 6: float("inf")}
    assert (directory / f"{name}.before").exists()


def test_a_torn_journal_is_repaired_at_once(tmp_path, monkeypatch, caplog):
    whole = tmp_path / "whole" / "s"
    whole.mkdir(parents=True)
    run_all(open_study(whole), 3)
    journal = (whole / "study.journal").read_bytes()
    last = journal.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(journal) + 1, 3):
        cut = cut_copy(whole, tmp_path / str(size) / "s", 10**6)
        os.truncate(cut / "trials.jsonl", (whole / "trials.jsonl").stat().st_size)
        os.truncate(cut / "study.journal", size)
        os.symlink(cut / "study.journal", cut / "study.journal.lock")
        os.symlink(cut / "study.journal", cut / "study.journal.lock1234.rename")
        with monkeypatch.context() as patch:
            patch.delattr(time, "sleep")  # with which Optuna waits 30 seconds for a lock
            open_study(cut)
        assert not caplog.text
        check_agrees(cut)
        assert not list(cut.glob("*.lock*")) and not list(cut.glob("*.before"))


def test_a_lagging_or_foreign_storage_is_mended(tmp_path):
    name = "study.journal"
    directory = tmp_path / "s"
    directory.mkdir()
    study = open_study(directory)
    run_all(study, 2)
    lagging = (directory / name).read_bytes()
    run_job(study, 2)
    study.trial(3)
    study.report(3, 10, 1.5)
    for content, is_kept in (
        (lagging, True),
        (b"hello\n", False),
        (b"", None),
        (b"\xff" * 99, False),
    ):
        (directory / name).write_bytes(content)
        open_study(directory)
        check_agrees(directory)
        before = directory / f"{name}.before"
        if is_kept is not None:
            assert before.exists() != is_kept
        before.unlink(missing_ok=True)
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "elsewhere")
    open_study(directory)
    assert not (tmp_path / "elsewhere").exists()
    check_agrees(directory)


def test_a_storage_that_cannot_be_written_does_not_end_the_sweep(tmp_path, caplog):
    (tmp_path / "study.journal.lock" / "x").mkdir(parents=True)  # as no kill leaves it
    study = open_study(tmp_path)
    run_all(study, 2)
    assert study.outcome(1) is Outcome.COMPLETE
    assert "study.journal is no longer updated" in caplog.text


def test_decisions_of_the_median_are_repeated(tmp_path):
    settings = {"pruner": "median", "pruner_settings": {"n_startup_trials": 2}}
    study = open_study(tmp_path, **settings)
    for number, value in enumerate((1.0, 2.0, 3.0)):
        study.trial(number)
        study.report(number, 100, value)
        study.finish(number, Outcome.COMPLETE, [value])
    study.trial(3)
    assert study.report(3, 50, 9.0) is None
    reason = "validation loss 2.5000 is above the median 2.0000 of 3 jobs at step 100"
    assert study.report(3, 100, 2.5) == reason
    study = open_study(tmp_path, **settings)
    assert study.report(3, 50, 9.0) is None
    assert study.report(3, 100, 2.5) == reason
    assert study.report(3, 200, 0.0) == reason, "the job has not ended yet"
    assert open_study(tmp_path).report(3, 100, 2.5) is None, "without a pruner"
    study.finish(3, Outcome.PRUNED, reason=reason)
    study.reopen(3)
    assert study.report(3, 50, 9.0) is None
    assert study.report(3, 100, 2.0) is None


def test_maximized_objectives_prune_below_the_median(tmp_path):
    settings = {"n_startup_trials": 1}
    study = open_study(
        tmp_path, pruner="median", pruner_settings=settings, objectives=("-accuracy",)
    )
    study.trial(0)
    study.report(0, 1, 0.5)
    study.finish(0, Outcome.COMPLETE, [0.5])
    study.trial(1)
    assert study.report(1, 1, 0.6) is None
    study.finish(1, Outcome.COMPLETE, [0.6])
    study.trial(2)
    assert study.report(2, 1, 0.1) == (
        "accuracy 0.1000 is below the median 0.5500 of 2 jobs at step 1"
    )
    study.finish(2, Outcome.FAILED)
    study.trial(3)
    assert "(not finite) is below" in str(study.report(3, 1, float("nan")))


def test_asha_keeps_the_best_third(tmp_path):
    study = open_study(tmp_path, pruner="asha", parallel=6)
    for number, value in enumerate((3.0, 2.0, 1.0)):
        study.trial(number)
        assert study.report(number, 20, value) is None
    study.trial(3)
    assert study.report(3, 10, 9.0) is None, "the first rung is at the first step reported, 20"
    reason = "not among the best third of 4 jobs at rung 1, step 20"
    assert study.report(3, 20, 2.5) == reason
    assert study.report(2, 60, 1.0) is None
    study = open_study(tmp_path, pruner="asha")
    assert study.report(3, 20, 2.5) == reason
    assert study.report(1, 60, 1.5) == "not among the best third of 2 jobs at rung 2, step 60"


def test_a_grid_may_change(tmp_path):
    def open_grid(*values: float, **settings) -> Study:
        listed = [{"lr": value, "betas": "[1,2]"} for value in values]
        study = Study(tmp_path, SweepConfig(**settings), {}, listed)
        study.begin()
        return study

    study = open_grid(0.1, 0.2)
    assert study.trial(1).values == {"lr": 0.2, "betas": "[1,2]"}
    study.finish(1, Outcome.COMPLETE, [1.0])
    study = open_grid(0.05, 0.2, 0.1)
    assert [study.outcome(number) for number in range(3)] == [None, Outcome.COMPLETE, None]
    assert study.trial(0).values["lr"] == 0.05
    trials = load(tmp_path)
    assert [trial.params["lr"] for trial in trials] == [0.2, 0.05]
    assert trials[0].state.name == "COMPLETE"


REFUSED = [
    ({"sampler_settings": {"n_startup_trial": 1}}, "did you mean"),
    ({"sampler_settings": {"n_startup_trials": -1}}, "at least 0"),
    ({"sampler_settings": {"n_startup_trials": True}}, "whole number"),
    ({"sampler_settings": {"multivariate": 1}}, "true or false"),
    ({"sampler": "random", "sampler_settings": {"a": 1}}, "has no settings"),
    ({"pruner": "asha", "pruner_settings": {"rungs": 1}}, "use one of min_resource"),
    ({"pruner": "asha", "pruner_settings": {"min_resource": 0}}, "at least 1"),
    ({"pruner_settings": {"n_min_trials": 1}}, "has no settings"),
    ({"seed": 2}, "sweep.seed=2 was 1"),
    ({"objectives": ("-val_loss",)}, "sweep.objectives=-val_loss was val_loss"),
    ({"objectives": ("val_loss", "x")}, "sweep.objectives=val_loss,x was val_loss"),
    ({"sampler": None}, "holds a search and the command is a grid"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_refused_in_one_line(tmp_path, settings, message):
    settings = {"sampler": "tpe", **settings}
    space = search_space(parse(*SWEPT))
    first = Study(tmp_path, SweepConfig(sampler="tpe"), space, fixed={"lr": 0.1})
    assert not list(tmp_path.iterdir()), "nothing is written before begin()"
    first.begin()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    listed = [{"lr": 1}] if settings["sampler"] is None else None
    with pytest.raises(ConfigError) as caught:
        Study(tmp_path, SweepConfig(**settings), space, listed, {"lr": 0.1})
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("swept", "fixed", "message"),
    [
        ([*SWEPT[:2], "kind=a,b"], {"x": 1}, "kind was searched in another range"),
        (SWEPT[:2], {"x": 1}, "kind was searched in this directory, and is not now"),
        ([*SWEPT, "more=1,2"], {"x": 1}, "more was not searched in this directory before"),
        (SWEPT, {"x": 2}, "x=2 was 1 in this directory; choose another run.name"),
        (SWEPT, {}, "x=not set was 1"),
        (SWEPT, {"x": 1, "y": 0.5}, "y=0.5 was not set"),
    ],
    ids=str,
)
def test_another_space_or_configuration_is_refused(tmp_path, swept, fixed, message):
    settings = SweepConfig(sampler="tpe")
    Study(tmp_path, settings, search_space(parse(*SWEPT)), fixed={"x": 1}).begin()
    with pytest.raises(ConfigError) as caught:
        Study(tmp_path, settings, search_space(parse(*swept)), fixed=fixed)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_values_outside_of_the_space_are_damage(tmp_path):
    run_all(open_study(tmp_path, "lr=interval(1,2)", "n=1,2", "kind=a,b"), 1)
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text().replace('"params":{"lr":1', '"params":{"lr":7'))
    with pytest.raises(RunError, match="values of trial 0 are damaged"):
        open_study(tmp_path, "lr=interval(1,2)", "n=1,2", "kind=a,b")


def test_a_study_killed_at_any_time_ends_as_undisturbed(tmp_path):
    settings = {"sampler": "tpe", "pruner": "median", "sampler_settings": {"n_startup_trials": 4}}
    trials = 40
    whole = tmp_path / "whole"
    whole.mkdir()
    run_all(open_study(whole, **settings), trials)
    directory = tmp_path / "killed"
    directory.mkdir()
    wait = random.Random("journal")
    killed = 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run_all(open_study(directory, **settings), trials)
                os._exit(0)
            os._exit(1)
        time.sleep(wait.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
    assert killed > 1
    run_all(open_study(directory, **settings), trials)
    assert lines_of(directory) == lines_of(whole)
    check_agrees(directory)
