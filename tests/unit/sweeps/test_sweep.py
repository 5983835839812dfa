"""What a sweep does before its first job."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from mingpt_ddp.config.config import from_dictconfig
from mingpt_ddp.config.hydra_utils import config_directory
from mingpt_ddp.distributed.exit import ProcessExit
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage import run_dir as rundir
from mingpt_ddp.sweeps import jobs
from mingpt_ddp.sweeps.sweep import Sweep, SweepPreflight


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin the search; the error that would end the process is raised."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def fail(self, error):
        raise error

    monkeypatch.setattr(ProcessExit, "user_error", fail)
    monkeypatch.setattr(
        "mingpt_ddp.sweeps.search.version", lambda package: "1.4"
    )  # of SQLAlchemy; nothing is written by it

    def begin(*words: str) -> DictConfig:
        with initialize_config_dir(str(config_directory()), version_base="1.3"):
            overrides = ["sweep=optuna_lr", f"run.root={tmp_path}", *words]
            loader = GlobalHydra.instance().config_loader()
            config = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
            sweep = Sweep()
            with sweep.active():
                SweepPreflight().on_multirun_start(config)
        sweep.lock.close()
        return config

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


def test_a_study_without_a_trial_takes_no_older_ones_place(begin, tmp_path):
    """A start that failed has left it."""
    optuna = pytest.importorskip("optuna")
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    directory = tmp_path / "optuna_lr"
    directory.mkdir()
    (directory / "study.db.before").write_text("of many hours")

    def make() -> Any:
        return optuna.create_study(study_name="optuna_lr", storage=f"sqlite:///{directory}/study.db")

    make()
    begin()
    assert [path.name for path in directory.iterdir() if path.name.startswith("study")] == ["study.db.before"]
    assert (directory / "study.db.before").read_text() == "of many hours"
    make().add_trial(optuna.trial.create_trial(value=1.0))
    begin()
    assert [path.name for path in directory.iterdir() if path.name.startswith("study")] == ["study.db.before"]
    assert (directory / "study.db.before").read_bytes().startswith(b"SQLite")


def test_somebody_else_may_read_the_study(begin, tmp_path):
    assert begin().hydra.sweeper.storage == f"sqlite:///{tmp_path}/optuna_lr/study.db?timeout=60"
    own = f"sqlite:///{tmp_path}/optuna_lr/study.db?timeout=5"
    assert begin(f"hydra.sweeper.storage='{own}'").hydra.sweeper.storage == own


def test_a_search_that_runs_keeps_its_study(begin, tmp_path, monkeypatch):
    directory = tmp_path / "optuna_lr"
    with rundir.acquire_lock(directory):
        (directory / "study.db").write_text("of the search that runs")
        monkeypatch.setattr(rundir.acquire_lock, "__defaults__", (0.0,))
        with pytest.raises(rundir.RunError, match="belongs to process"):
            begin()
        assert (directory / "study.db").read_text() == "of the search that runs"


def test_a_key_that_stands_twice_is_what_it_is_last(begin):
    """Hydra's own sweeper has the same rule; Optuna's plug-in would keep the fixed value."""
    interval = "optimizer.lr=interval(1e-3,1e-2)"
    hydra = begin(
        "optimizer.lr=1,2", "model=gpt_nano", "run.seed=1,2", interval, "run.seed=3,4", "model=gpt_micro"
    ).hydra
    assert sorted(word for word in hydra.overrides.task if not word.startswith(("sweep=", "run.root="))) == [
        "model=gpt_micro",
        interval,
        "optimizer.weight_decay=tag(log, interval(1e-3, 1))",
        "run.seed=3,4",
    ]
    assert not hydra.sweeper.params


def test_a_grid_has_the_last_list_of_a_key(tmp_path):
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        words = [f"run.root={tmp_path}", "run.name=grid", "run.seed=1,2,3", "run.seed=4,5"]
        loader = GlobalHydra.instance().config_loader()
        sweep = Sweep()
        with sweep.active():
            SweepPreflight().on_multirun_start(loader.load_configuration("config", words, run_mode=RunMode.MULTIRUN))
        parsed = OverridesParser.create(loader).parse_overrides(words)
    sweep.lock.close()
    ((*jobs,),) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    assert [job[-1] for job in jobs] == ["run.seed=4", "run.seed=5"]
    assert sweep.planned == len(jobs)


def test_a_root_that_looks_like_a_number(begin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert begin("run.root=2024", "run.seed=1,2").hydra.sweep.dir == "2024/optuna_lr"


def test_an_interval_of_a_key_that_is_whole(begin):
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps=254.84 must be a whole number"):
        begin("optimizer.warmup_steps=interval(20,400)")
    begin("optimizer.warmup_steps=int(interval(20,400))")


@pytest.mark.parametrize(
    ("limits", "done"),
    [
        ({"max_steps": 10, "max_epochs": None}, True),
        ({"max_steps": 9, "max_epochs": None}, True),
        ({"max_steps": 10, "max_epochs": 1}, True),
        ({"max_steps": 11, "max_epochs": None}, False),
        ({"max_steps": None, "max_epochs": 1}, False),
    ],
)
def test_a_smaller_limit_was_reached_on_the_way(limits, done, tmp_path):
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        words = ["run.name=sweep", f"run.root={tmp_path}", "trainer.max_steps=10", "trainer.max_epochs=null"]
        config = from_dictconfig(compose("config", words))
    directory = tmp_path / jobs.look_up(config, {})[0]
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    (directory / "result.json").write_text('{"status": "complete", "step": 10, "val_loss": 2.5}')
    wanted = replace(config, trainer=replace(config.trainer, **limits))
    assert jobs.look_up(wanted, {}) == (f"sweep/{directory.name}", 2.5 if done else None)


@pytest.mark.parametrize("loss", ["1" + "0" * 400, "NaN", "null", "[]", "true", '"2.5"'])
def test_a_loss_that_is_no_number_is_that_of_no_finished_job(loss, tmp_path):
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        config = from_dictconfig(compose("config", ["run.name=sweep", f"run.root={tmp_path}", "run.seed=1"]))
    name, done = jobs.look_up(config, {"run.seed": "1"})
    assert done is None
    directory = tmp_path / name
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    (directory / "result.json").write_text('{"status": "complete", "step": 1, "val_loss": 2.5}')
    assert jobs.look_up(config, {"run.seed": "1"}) == (name, 2.5)
    (directory / "result.json").write_text(f'{{"status": "complete", "step": 1, "val_loss": {loss}}}')
    assert jobs.look_up(config, {"run.seed": "1"}) == (name, None)
