"""A study that is killed anywhere draws, prunes and ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time

import optuna
import pytest

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.errors import ConfigError, RunError
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.space import grid, search_space
from mingpt_ddp.sweeps.search.study import Study
from tests.unit.sweeps.studies import (
    SWEPT,
    cut_copy,
    load,
    open_study,
    parse,
    run_all,
    trials_of,
)

STARTUP = {"tpe": {"n_startup_trials": 3}, "gp": {"n_startup_trials": 3}}
SAMPLERS = ("tpe", "gp", "random")


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
    expected = trials_of(whole)
    assert {"PRUNED", "FAIL"} < {state for _, state, *_ in expected}
    data = (whole / "study.journal").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    sizes = [0, 1, *ends, *(end - 7 for end in ends[::3])]
    if (sampler, pruner) != ("tpe", "asha"):  # what they share is checked once, gp draws slowly
        sizes = sizes[:: len(sizes) // 6]
    for size in sizes:
        cut = cut_copy(whole, tmp_path / str(size) / "s", size)
        run_all(open_study(cut, **settings), trials)
        assert trials_of(cut) == expected, size


def test_a_trial_is_drawn_from_the_results_that_there_are(tmp_path):
    """One that runs is none; one that has begun keeps its values, whatever ends meanwhile."""
    found = []
    for name, ends_first in (("a", False), ("b", True)):
        directory = tmp_path / name
        directory.mkdir()
        settings = {"sampler": "tpe", "sampler_settings": {"n_startup_trials": 1}}
        study = open_study(directory, parallel=2, **settings)
        run_all(study, 3)
        study.values(3)
        if ends_first:
            study.finish(3, TrialState.COMPLETE, 0.0, "job-3")
        drawn = study.values(4)
        if not ends_first:
            study.finish(3, TrialState.COMPLETE, 0.0, "job-3")
        assert open_study(directory, parallel=2, **settings).values(4) == drawn
        found.append(drawn)
    assert found[0] != found[1]


def test_optuna_reads_the_study_after_each_change(tmp_path):
    directory = tmp_path / "a b?c%20#'d"
    directory.mkdir()
    study = open_study(directory, pruner="median")
    assert study.values(0) == load(directory)[0].params
    study.report(0, 5, 2.0)
    study.report(0, 6, float("nan"))
    study.finish(0, TrialState.COMPLETE, 3.0, job="job-0")
    study.values(1)
    study.fail(1)
    assert study.state(1) == TrialState.FAIL
    study.reopen(1)
    assert study.state(1) == TrialState.RUNNING
    study.values(2)
    study.finish(1, TrialState.COMPLETE, 2.0, job="job-1")
    copied = tmp_path / "copy"  # a study is found under another name of its directory
    shutil.copytree(directory, copied)
    for each in (directory, copied):
        trials = load(each)
        assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "RUNNING"]
        assert trials[0].value == 3.0 and trials[0].user_attrs == {"job": "job-0"}
        assert trials[0].intermediate_values == {5: 2.0, 6: float("inf")}
    assert open_study(copied, pruner="median").values(2) == study.values(2)


def test_what_a_kill_leaves_beside_the_journal_is_removed(tmp_path, monkeypatch):
    run_all(open_study(tmp_path), 1)
    journal = tmp_path / "study.journal"
    for name in (f"{journal.name}.lock", f"{journal.name}.lock1234.rename"):
        (tmp_path / name).symlink_to(journal)
    (tmp_path / f".{journal.name}.0123abcd.partial").write_text("half")
    monkeypatch.delattr(time, "sleep")  # with which Optuna waits 30 seconds for a lock
    run_all(open_study(tmp_path), 2)
    assert [path.name for path in tmp_path.iterdir()] == [journal.name]


@pytest.mark.parametrize("trials", [0, 1])
def test_a_moved_or_copied_journal_of_another_study_is_refused(tmp_path, trials):
    path = tmp_path / "study.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name=tmp_path.name)
    study.add_trials([optuna.create_trial(value=1.0)] * trials)
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"study.journal is damaged; move it away to begin a new"):
        open_study(tmp_path)
    assert path.read_bytes() == before


def test_a_search_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "trials.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"earlier version, trials.jsonl; choose another"):
        open_study(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_lost_journal_beside_jobs_that_have_ended_is_refused(tmp_path, is_empty):
    """A new study would train other jobs beside them."""
    run_all(open_study(tmp_path), 2)
    for number in range(2):
        (tmp_path / f"job-{number}").mkdir()
        (tmp_path / f"job-{number}" / "result.json").write_text("{}")
    journal = tmp_path / "study.journal"
    journal.write_text("") if is_empty else journal.unlink()
    before = sorted(tmp_path.rglob("*"))
    expected = r"study.journal is missing or empty, and 2 jobs of its search have ended; restore it"
    with pytest.raises(ConfigError, match=expected):
        open_study(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_limits_may_grow(tmp_path):
    study = open_study(tmp_path)
    study.values(0)
    study.report(0, 10, 2.0)
    study.finish(0, TrialState.COMPLETE, 2.0, "job-0")
    study = open_study(tmp_path)
    study.reopen(0)
    study = open_study(tmp_path)
    assert study.state(0) == TrialState.RUNNING
    study.report(0, 20, 1.0)
    study.finish(0, TrialState.COMPLETE, 1.0, "job-0")
    (trial,) = load(tmp_path)
    assert trial.values == [1.0] and trial.intermediate_values == {10: 2.0, 20: 1.0}


def test_decisions_of_the_median_are_repeated(tmp_path):
    settings = {"pruner": "median", "pruner_settings": {"n_startup_trials": 2}}
    study = open_study(tmp_path, **settings)
    for number, value in enumerate((1.0, 2.0, 3.0)):
        study.values(number)
        study.report(number, 100, value)
        study.finish(number, TrialState.COMPLETE, value, f"job-{number}")
    study.values(3)
    assert study.report(3, 50, 9.0) is None
    reason = "validation loss 2.5000 is above the median 2.0000 of 3 jobs at step 100"
    assert study.report(3, 100, 2.5) == reason
    study = open_study(tmp_path, **settings)
    assert study.report(3, 50, 9.0) is None
    assert study.report(3, 100, 2.5) == reason
    assert study.report(3, 200, 0.0) == reason, "the job has not ended yet"
    assert open_study(tmp_path).report(3, 100, 2.5) is None, "without a pruner"
    study.finish(3, TrialState.PRUNED, None, "job-3")
    study.reopen(3)
    assert study.report(3, 50, 9.0) is None
    assert study.report(3, 100, 2.0) is None


def test_a_maximized_metric_prunes_below_the_median(tmp_path):
    settings = {"n_startup_trials": 1}
    study = open_study(tmp_path, pruner="median", pruner_settings=settings, metric="-accuracy")
    study.values(0)
    study.report(0, 1, 0.5)
    study.finish(0, TrialState.COMPLETE, 0.5, "job-0")
    study.values(1)
    assert study.report(1, 1, 0.6) is None
    study.finish(1, TrialState.COMPLETE, 0.6, "job-1")
    study.values(2)
    assert study.report(2, 1, 0.1) == (
        "accuracy 0.1000 is below the median 0.5500 of 2 jobs at step 1"
    )
    study.fail(2)
    study.values(3)
    assert "(not finite) is below" in str(study.report(3, 1, float("nan")))


def test_asha_keeps_the_best_third(tmp_path):
    study = open_study(tmp_path, pruner="asha", parallel=6)
    for number, value in enumerate((3.0, 2.0, 1.0)):
        study.values(number)
        assert study.report(number, 20, value) is None
    study.values(3)
    assert study.report(3, 10, 9.0) is None, "the first rung is at the first step reported, 20"
    reason = "not among the best third of 4 jobs at rung 1, step 20"
    assert study.report(3, 20, 2.5) == reason
    assert study.report(2, 60, 1.0) is None
    study = open_study(tmp_path, pruner="asha")
    assert study.report(3, 20, 2.5) == reason
    assert study.report(1, 60, 1.5) == "not among the best third of 2 jobs at rung 2, step 60"


def open_grid(directory, **swept: str) -> Study:
    listed, space = grid(parse(*(f"{key}={values}" for key, values in swept.items())))
    study = Study(directory, SweepConfig(pruner="median"), space)
    study.begin()
    for number, values in enumerate(listed):
        study.number_of(f"job-{number}", values)
    return study


def test_the_values_of_a_grid_are_what_optuna_can_hold(tmp_path):
    open_grid(tmp_path, lr="0.1,1e-3,0.001", betas="[1,2],[3,4]", kind="a,b")
    first, *others = load(tmp_path)
    assert len(others) == 11 and first.params == {"lr": 0.1, "betas": "[1,2]", "kind": "a"}
    assert first.distributions["lr"].choices == (0.1, 0.001)
    assert first.distributions["betas"].choices == ("[1,2]", "[3,4]")


def test_a_job_has_one_record_whatever_keys_of_its_grid_vary(tmp_path):
    """Otherwise a pruner would count it twice."""
    study = open_grid(tmp_path, lr="1,2")
    for number in range(2):
        study.report(number, 10, 2.0 - number)
        study.finish(number, TrialState.COMPLETE, 2.0 - number, f"job-{number}")
    listed, space = grid(parse("lr=2,3,1", "n=4,4.0"))
    for _ in range(2):
        study = Study(tmp_path, SweepConfig(pruner="median"), space)
        study.begin()
        jobs = ("job-1", "job-1", "job-2", "job-2", "job-0", "job-0")
        found = [study.number_of(*each) for each in zip(jobs, listed, strict=True)]
        assert found == [1, 1, 2, 2, 0, 0]
        states = [study.state(number).name for number in range(4)]
        assert states == ["COMPLETE", "COMPLETE", "RUNNING", "WAITING"]
    trials = load(tmp_path)
    assert [trial.params for trial in trials] == [{"lr": 1}, {"lr": 2}, {"lr": 3, "n": 4}]
    assert [trial.intermediate_values for trial in trials] == [{10: 2.0}, {10: 1.0}, {}]


REFUSED = [
    ({"sampler_settings": {"n_startup_trial": 1}}, "did you mean"),
    ({"sampler_settings": {"n_startup_trials": -1}}, "greater than or equal to 0"),
    ({"sampler_settings": {"n_startup_trials": True}}, "must be a whole number"),
    ({"sampler_settings": {"multivariate": 1}}, "must be true or false"),
    ({"sampler": "random", "sampler_settings": {"a": 1}}, "has no settings"),
    ({"pruner": "asha", "pruner_settings": {"rungs": 1}}, "use one of min_resource"),
    ({"pruner": "asha", "pruner_settings": {"min_resource": 0}}, "greater than or equal to 1"),
    ({"pruner_settings": {"n_min_trials": 1}}, "has no settings"),
    ({"seed": 2}, "sweep.seed=2 was 1"),
    ({"metric": "-val_loss"}, "sweep.metric=-val_loss was val_loss in this directory"),
    ({"metric": "x"}, "sweep.metric=x was val_loss in this directory"),
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
    with pytest.raises(ConfigError) as caught:
        Study(tmp_path, SweepConfig(**settings), space, {"lr": 0.1})
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


DAMAGE = {
    "a value outside of its range": (b'"params":{"lr":1', b'"params":{"lr":7'),
    "a directory outside of the sweep": (b'"job":"job-0"', b'"job":"../job-0"'),
    "an unknown kind of line": (b'"op_code":4', b'"op_code":44'),
    "no header": (b'"mingpt_ddp"', b'"other"'),
    "a header of another kind": (b'"seed":1', b'"seed":"1"'),
    "no JSON at the end": (b'"state":1,"values"', b'"state":1"values"'),
    "no JSON in the middle": (b'"state":0,"value"', b'"state":0"value"'),
    "nothing of Optuna": (None, b"hello\n"),
    "other JSON": (None, b"[1]\n"),
    "nested": (None, b"[" * 100_000 + b"\n"),
    "binary": (None, b"\xff\xfe\n"),
    "binary without a newline": (None, b"\xff\xfe"),
    "text without a newline": (None, b"notes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(tmp_path, kind):
    swept = ("lr=interval(1,2)", "n=1,2", "kind=a,b")
    run_all(open_study(tmp_path, *swept), 1)
    path = tmp_path / "study.journal"
    old, new = DAMAGE[kind]
    content = path.read_bytes()
    assert old is None or old in content
    content = new if old is None else content.replace(old, new)
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"study.journal is damaged; move it away") as caught:
        open_study(tmp_path, *swept)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_only_a_regular_file_is_read(tmp_path):
    path = tmp_path / "study.journal"
    os.mkfifo(path)
    with pytest.raises(RunError, match="not a regular file"):
        open_study(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="cannot be read"):
        open_study(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_no_half_line(tmp_path):
    """The same process goes on once there is room again, and so does another one."""
    study = open_study(tmp_path)
    study.values(0)
    path = tmp_path / "study.journal"
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .*study.journal: "):
            study.report(0, 10, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    study.report(0, 10, 1.0)
    for each in (study, open_study(tmp_path)):
        assert each.trial(0).intermediate_values == {10: 1.0}


def test_asha_counts_the_rungs_that_optuna_would_keep(tmp_path):
    """Also where an evaluation passes several of them: a trial that ends at the first one has
    not reached the others.
    """
    rungs = {0: 5.0, 1: 3.0, 2: 4.0, 3: 2.0, 4: 6.0}
    steps = (9, 27)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    theirs = optuna.create_study(pruner=pruner)
    settings = {"pruner": "asha", "pruner_settings": {"min_resource": 1}}
    for number, value in rungs.items():
        trial = theirs.ask()
        open_study(tmp_path, **settings).values(number)
        for step in steps:
            trial.report(value, step)
            is_pruned = open_study(tmp_path, **settings).report(number, step, value) is not None
            assert is_pruned == trial.should_prune(), (number, step)
            if is_pruned:
                break


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
    assert trials_of(directory) == trials_of(whole)
