"""The study of a search draws values, records results and prunes jobs.

Its journal survives kills and full disks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.errors import RunError
from mingpt_ddp.study.sweeps.search.space import search_space
from mingpt_ddp.study.sweeps.search.study import Study

SWEPT = ("lr=tag(log,interval(1e-5,1))", "n=int(interval(1,9))", "kind=a,b,1")


@pytest.fixture(scope="module")
def config() -> Config:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", ["trainer.eval_every=20"])))


@pytest.fixture
def open_study(config, tmp_path):
    """Return a function that opens the study as the start of a sweep does."""

    def open_study(directory: Path = tmp_path, **settings: Any) -> Study:
        sweep = SweepConfig(**{"sampler": "random", **settings})
        space = search_space(OverridesParser.create().parse_overrides([*SWEPT]))
        return Study(directory, replace(config, sweep=sweep), space, {"x": 1})

    return open_study


def end(study: Study, directory: Path, number: int, loss: float, status="complete") -> None:
    """Write the result of a job, and record it in the study."""
    job = directory / f"job-{number}"
    job.mkdir(exist_ok=True)
    (job / "result.json").write_text(json.dumps({"status": status, "val_loss": loss}))
    study.end(number, job)


def load(directory: Path) -> list[optuna.trial.FrozenTrial]:
    """Read the single study of a journal as Optuna's own tools do."""
    backend = optuna.storages.journal.JournalFileBackend(str(directory / "study.journal"))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name=None, storage=storage).trials


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
@pytest.mark.filterwarnings("error")
def test_a_restart_keeps_the_values_and_repeats_no_draw(
    open_study, tmp_path, sampler, capfd, caplog
):
    """The restart may come before any trial. Optuna prints no lines or warnings."""
    caplog.set_level(logging.DEBUG)
    settings = {"n_startup_trials": 2}
    if sampler == "gp":
        settings["deterministic_objective"] = True
    drawn = []
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    whole.mkdir()
    restarted.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        once = open_study(whole, sampler=sampler, sampler_settings=settings)
        for number in range(4):
            study = open_study(restarted, sampler=sampler, sampler_settings=settings)
            drawn.append(study.values(number))
            assert open_study(restarted, sampler=sampler).values(number) == drawn[-1]
            assert once.values(number) == drawn[-1]
            for each, directory in ((once, whole), (study, restarted)):
                end(each, directory, number, drawn[-1]["lr"])
    assert len({values["lr"] for values in drawn}) == 4
    assert [trial.params for trial in load(restarted)] == drawn
    assert not caught and capfd.readouterr() == ("", "")
    assert not [each for each in caplog.records if not each.name.startswith("mingpt_ddp")]


def test_the_end_of_each_trial(open_study, tmp_path):
    """Each end is recorded once. It can be read after the directory was moved."""
    study = open_study()
    for number in range(4):
        study.values(number)
    study.report(0, 10, 2.5)
    for _ in range(2):
        end(study, tmp_path, 0, 2.0)
        study.fail(2)
    study.report(1, 10, 3.0)
    end(study, tmp_path, 1, 3.0, "pruned")
    copied = tmp_path / "copy"
    copied.mkdir()
    shutil.copy(tmp_path / "study.journal", copied)
    for directory in (tmp_path, copied):
        study = open_study(directory)
        states = [trial.state.name for trial in load(directory)]
        assert states == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
        assert [trial.value for trial in load(directory)] == [2.0, 3.0, None, None]
        jobs = [study.directory_of(number) for number in range(5)]
        assert jobs == [directory / "job-0", directory / "job-1", None, None, None]
        assert [number for number in range(5) if study.has_failed(number)] == [2]


@pytest.mark.parametrize(
    ("pruner", "settings", "metric", "sign"),
    [
        ("median", {"n_startup_trials": 3}, None, 1),
        ("median", {"n_startup_trials": 3}, "-val_loss", -1),
        ("asha", {}, None, 1),
    ],
)
def test_a_pruner_ends_the_worst_and_a_kill_repeats_its_decision(
    open_study, tmp_path, pruner, settings, metric, sign
):
    settings = {"pruner": pruner, "pruner_settings": settings, "metric": metric}
    study = open_study(**settings)
    for number, value in enumerate((3.0, 2.0, 1.0)):
        study.values(number)
        assert study.report(number, 20, sign * value) is None
        end(study, tmp_path, number, sign * value)
    study.values(3)
    assert study.report(3, 10, sign * 9.0) is None
    reason = f"other jobs have better evaluations (sweep.pruner={pruner})"
    assert study.report(3, 20, sign * 2.5) == reason
    if pruner == "median":  # asha decides only once at each of its rungs
        journal = tmp_path / "study.journal"
        *lines, decision = journal.read_bytes().splitlines(keepends=True)
        assert b"pruned_at" in decision
        journal.write_bytes(b"".join(lines))  # simulates a kill before the decision is recorded
        assert open_study(**settings).report(3, 20, sign * 2.5) == reason
    again = open_study(**settings)  # simulates a restart after a kill, before the job has ended
    assert again.report(3, 10, sign * 9.0) is None
    assert again.report(3, 20, sign * 2.5) == reason
    again.values(4)
    assert again.report(4, 20, sign * 0.5) is None
    assert again.report(4, 40, sign * 0.4) is None
    again = open_study(**settings)
    for number in (5, 6, 7):  # concurrent jobs, which do not wait for job 4
        again.values(number)
        for step in (20, 40):
            assert again.report(number, step, sign * 0.1) is None
        end(again, tmp_path, number, sign * 0.1)
    assert again.report(4, 20, sign * 9.0) is None, "the job has resumed: this was decided before"
    assert load(tmp_path)[4].intermediate_values == {20: sign * 0.5, 40: sign * 0.4}


def test_files_that_a_kill_leaves_beside_the_journal_are_removed(open_study, tmp_path, monkeypatch):
    values = open_study().values(0)
    path = tmp_path / "study.journal"
    for name in (f"{path.name}.lock", f"{path.name}.lock1234.rename"):
        (tmp_path / name).symlink_to(path)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    monkeypatch.delattr(time, "sleep")  # Optuna would wait 30 seconds for a lock
    study = open_study()
    assert (study.values(0), study.values(1)) == (values, load(tmp_path)[1].params)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


DAMAGED = "study.journal is damaged; move it away"
ANOTHER = "trial 0 does not belong to this search"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r'.*"op_code":4', '{"op_code":44', DAMAGED),
        (r'"op_code":2', '"op_code"2', DAMAGED),
        (r'"mingpt_ddp"', '"other"', DAMAGED),
        (r'"mingpt_ddp":{', '"mingpt_ddp":[],"other":{', DAMAGED),
        (r"(.*\n)*", "[1]\n", DAMAGED),
        (r"(.*\n)*", "[" * 100_000 + "\n", DAMAGED),
        (r"(.*\n)*", "\udcff\udcfe\n", DAMAGED),
        (r"(.*\n)*", "notes", DAMAGED),
        # Values from another program would become overrides, for example a key that runs code.
        (r'"kind":(?=\d|"{)', '"task.code":', ANOTHER),
        (r'(?<=\\")a(?=\\")', "a.py", ANOTHER),  # not one of the choices
        (r'"lr":[0-9.e-]+', '"lr":1e300', ANOTHER),  # out of range
        (r'"job":"job-0"', '"other":1', ANOTHER),
        (r'"job":"job-0"', '"job":"../elsewhere"', ANOTHER),
        (r'"job":"job-0"', '"job":5', ANOTHER),
    ],
)
def test_a_journal_from_another_program_is_refused(open_study, tmp_path, old, new, message):
    """It is refused in one line, and not changed."""
    study = open_study()
    study.values(0)
    end(study, tmp_path, 0, 1.0)
    path = tmp_path / "study.journal"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    content = re.sub(old, lambda match: new, before, count=0 if message == ANOTHER else 1)
    assert content != before
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=message) as caught:
        open_study()
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content.encode(errors="surrogateescape")


def test_only_a_regular_file_is_read(open_study, tmp_path):
    path = tmp_path / "study.journal"
    os.mkfifo(path)
    with pytest.raises(RunError, match="not a regular file"):
        open_study()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="cannot be read"):
        open_study()
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_no_half_line(open_study, tmp_path):
    """Once there is room again, the same process and a new one can continue."""
    study = open_study()
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
    open_study()
    assert load(tmp_path)[0].intermediate_values == {10: 1.0}
