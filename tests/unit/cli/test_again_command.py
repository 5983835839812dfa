"""The again command: the command line that it prints, and what that composes to."""

from __future__ import annotations

import datetime
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from multiprocess.ranks import configure
from tools import call_tool

from mingpt_ddp.cli.commands import again

Words = tuple[list[str], str]


def recorded(root: Path, *overrides: str, name: str = "run", **changes: Any) -> str:
    """Write the configuration that a run would record; return its directory."""
    values = configure(*overrides)
    for key, value in changes.items():
        group, _, key = key.partition("__")
        values[group][key] = value
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(yaml.safe_dump(values))
    return str(root / name)


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that calls the command, which does not go on to train."""
    monkeypatch.setattr(os, "execv", lambda *_: None)
    return call_tool(again, monkeypatch, capsys)


@pytest.fixture
def printed(call):
    """Return a function that returns the words of the printed command line, and what is logged."""

    def read(run: str, *typed: str) -> Words:
        code, out, err = call(run, *typed)
        assert code == 0, err
        python, m, package, *words = shlex.split(out)
        assert (python, m, package) == ("python", "-m", "mingpt_ddp")
        return words, err

    return read


@pytest.fixture
def composed(printed):
    """Return a function that returns the configuration that the printed command line trains."""
    return lambda run, *typed: configure(*printed(run, *typed)[0])


@pytest.mark.parametrize("experiment", ["demo", "shakespeare_char_best", "shakespeare_bpe_cpu"])
def test_the_words_compose_to_the_recorded_configuration(experiment, tmp_path, composed):
    own = ["trainer.max_epochs=7", "run.seed=5", "model.name='a b=\"c'", "tracker=[mlflow]"]
    run = recorded(tmp_path, f"experiment={experiment}", *own)
    expected = configure(f"experiment={experiment}", *own, f"run.root={tmp_path}", "run.name=run")
    assert composed(run) == expected


def test_a_mapping_is_taken_literally(tmp_path, composed):
    """Also what Hydra would replace by a variable of the environment."""
    paths = {"wiki": "my wiki.txt", "odd": "${oc.env:HOME},{a: 'b\"}"}
    assert composed(recorded(tmp_path, data__val_paths=paths))["data"]["val_paths"] == paths


@pytest.mark.parametrize(
    ("typed", "goes_on"),
    [
        ([], True),
        (["trainer.max_steps=99"], True),
        (["trainer.log_every=7"], True),
        (["optimizer.lr=1e-3"], True),  # the recorded value
        (["optimizer.weight_decay=0.1"], True),  # its default, which an earlier version left out
        (["optimizer.weight_decay=0.2"], False),
        (["optimizer.lr=2e-3"], False),
        (["run.seed=4"], False),
        (["ddp.reduction=canonical", "trainer.micro_batch_size=3"], False),
        (["model=gpt_nano"], False),
    ],
)
def test_the_run_goes_on_unless_its_numbers_change(typed, goes_on, tmp_path, composed):
    run = recorded(tmp_path, "optimizer.lr=1e-3", name="sweep/lr=1", run__name="sweep/lr=1")
    values = yaml.safe_load(Path(run, "config.yaml").read_text())
    del values["optimizer"]["weight_decay"]
    Path(run, "config.yaml").write_text(yaml.safe_dump(values))
    config = composed(run, *typed)
    assert config["run"]["root"] == str(tmp_path)
    assert config["run"]["name"] == ("sweep/lr=1" if goes_on else None)


def test_one_limit_and_one_batch_size(tmp_path, composed, printed):
    run = recorded(tmp_path, "trainer.max_steps=50", "trainer.batch_size=8")
    trainer = composed(run, "trainer.max_epochs=3")["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == (3, None)
    words, _ = printed(run, "trainer.batch_size_per_rank=4")
    assert not any(word.startswith("trainer.batch_size=") for word in words)


def test_what_a_stranger_could_misuse_is_left_out_unless_it_is_typed(tmp_path, printed):
    theirs = {
        "snapshot__path": "s3://theirs/x",
        "run__resume": "http://theirs/y",
        "tracker__entity": "theirs",
        "tracker__uri": "/home/theirs",
        "data__path": "/tmp/a::b",
        "data__cache_dir": "/home/x",
    }
    run = recorded(tmp_path, **theirs)
    words, logged = printed(run)
    assert not any(word in " ".join(words) for word in ("theirs", "::", "/home/x", "code"))
    assert logged.count("\n") == 1 and "snapshot.path=s3://theirs/x" in logged
    assert "snapshot.path=s3://mine/x" in printed(run, "snapshot.path=s3://mine/x")[0]


def test_a_date_that_somebody_has_typed_is_a_text(tmp_path, composed):
    run = recorded(tmp_path, data__name=datetime.date(2020, 1, 1))
    assert composed(run)["data"]["name"] == "2020-01-01"


@pytest.mark.parametrize(("recorded_keys", "format"), [({}, "text"), ({"format": "auto"}, "auto")])
def test_a_text_is_read_as_by_the_version_that_has_recorded_it(
    recorded_keys, format, tmp_path, composed
):
    """Runs without data.format took JSON Lines as text, and files that are skipped now."""
    values = configure("run.name=run")
    del values["data"]["format"]
    values["data"] |= recorded_keys
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert composed(str(tmp_path))["data"]["format"] == format


def test_code_of_yours_needs_its_preset(tmp_path, call, printed):
    run = recorded(tmp_path, model__architecture="lstm", model__code="mine.py")
    code, out, err = call(run)
    assert (code, out) == (2, "")
    assert re.search(r"model.architecture=lstm is in code of yours; type .* model=NAME", err)
    words, _ = printed(run, "--config-dir=mine", "model=lstm", "optimizer.lr=1")
    assert "++model.n_layer=4" in words, "the recorded keys of the preset"
    assert words[-3:] == ["--config-dir=mine", "model=lstm", "optimizer.lr=1"]


def test_code_of_yours_is_typed(tmp_path, call, printed):
    """One line has all the words, before anything is printed."""
    run = recorded(tmp_path, model__activation="mine", model__code="mine.py")
    code, out, err = call(run)
    assert (code, out) == (2, "") and err.endswith(" with --config-dir=DIR model.code=mine.py\n")
    source = {"provider": "command-line", "path": "/my recipe"}
    hydra = {"job": {"config_name": "config"}, "runtime": {"config_sources": [source]}}
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    assert call(run)[2].endswith(" with '--config-dir=/my recipe' model.code=mine.py\n")
    typed = ["--config-dir=/my recipe", "model.code=mine.py"]
    assert printed(run, *typed)[0][-2:] == typed


ODD_KEY = "model: {architecture: mine, 'code ': x}\nrun: {}\noptimizer: {}\ndata: {}\ntrainer: {}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.yaml of a run"),
        ("", "has no config.yaml of a run"),
        ("model: {architecture: gpt}", "has no config.yaml of a run"),
        (ODD_KEY, "has the key 'code '"),
    ],
)
def test_other_directories_are_refused(content, message, tmp_path, call):
    if content is None:
        (tmp_path / "config.yaml").symlink_to("config.yaml")
    else:
        (tmp_path / "config.yaml").write_text(content)
    code, out, err = call(str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("config error: ") and message in err
