"""What a sweep does before its first job."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from mingpt_ddp import leave, rundir
from mingpt_ddp.composed import config_directory
from mingpt_ddp.sweep import Start


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin the search; the error that would end the process is raised."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def fail(error, place, job):
        raise error

    monkeypatch.setattr(leave, "with_user_error", fail)
    monkeypatch.setattr("mingpt_ddp.search.version", lambda package: "1.4")  # of SQLAlchemy; nothing is written by it

    def begin():
        with initialize_config_dir(str(config_directory()), version_base="1.3"):
            words = ["sweep=optuna_lr", f"run.root={tmp_path}"]
            Start().on_multirun_start(compose("config", words, return_hydra_config=True))

    return begin


def test_a_study_is_put_aside_with_the_journal_that_a_kill_has_left(begin, tmp_path):
    directory = tmp_path / "optuna_lr"
    directory.mkdir()
    for name in ("study.db", "study.db-journal", "study.db.before"):
        (directory / name).write_text(name)
    begin()
    there = {path.name: path.read_text() for path in directory.iterdir() if path.name.startswith("study")}
    assert there == {"study.db.before": "study.db", "study.db.before-journal": "study.db-journal"}


def test_an_older_journal_is_not_left_beside_a_study_that_was_closed(begin, tmp_path):
    """SQLite would take it for that study's own."""
    directory = tmp_path / "optuna_lr"
    directory.mkdir()
    for name in ("study.db", "study.db.before", "study.db.before-journal"):
        (directory / name).write_text(name)
    begin()
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith("study")) == ["study.db.before"]


def test_a_search_that_runs_keeps_its_study(begin, tmp_path, monkeypatch):
    directory = tmp_path / "optuna_lr"
    with rundir.hold(directory):
        (directory / "study.db").write_text("of the search that runs")
        monkeypatch.setattr(rundir.hold, "__defaults__", (0.0,))
        with pytest.raises(rundir.RunError, match="belongs to process"):
            begin()
        assert (directory / "study.db").read_text() == "of the search that runs"
