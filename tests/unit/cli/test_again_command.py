"""The again command trains a recorded configuration with changes. It refuses other directories."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from multiprocess.ranks import configure

from mingpt_ddp.cli.recorded_preset import store_recorded
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.compose.resolve import command_line_keys
from mingpt_ddp.config.config import to_plain
from mingpt_ddp.config.job import Job
from mingpt_ddp.errors import ConfigError


def recorded(root: Path, *overrides: str, name: str = "run", **changes: Any) -> str:
    """Write the configuration that a run would record. Return the run directory."""
    values = configure(*overrides)
    for key, value in changes.items():
        group, _, key = key.partition("__")
        values[group][key] = value
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(yaml.safe_dump(values))
    return str(root / name)


def composed(run: str, *command_line: str, presets: Path | None = None) -> dict[str, Any]:
    """Return the configuration that the command trains."""
    words = store_recorded(run, [*command_line])
    path = [] if presets is None else [str(presets)]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        values = to_plain(compose("config", [*words, f"hydra.searchpath={path}"]))
    return Job.build(values, command_line_keys(words), path, {}, {}).config.to_dict()


def refusal(run: str, *command_line: str) -> str:
    with pytest.raises(ConfigError) as refused:
        store_recorded(run, [*command_line])
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("experiment", ["demo", "shakespeare_char_best", "shakespeare_bpe_cpu"])
def test_it_is_the_recorded_configuration(experiment, tmp_path):
    own = ["trainer.max_epochs=7", "run.seed=5", "model.name='a b=\"c'", "tracker=[mlflow]"]
    run = recorded(tmp_path, f"experiment={experiment}", *own)
    expected = configure(f"experiment={experiment}", *own, f"run.root={tmp_path}", "run.name=run")
    assert composed(run) == expected


def test_a_mapping_is_taken_literally(tmp_path):
    """A value that looks like an interpolation is not replaced by an environment variable."""
    paths = {"wiki": "my wiki.txt", "odd": "${oc.env:HOME},{a: 'b\"}"}
    assert composed(recorded(tmp_path, data__val_paths=paths))["data"]["val_paths"] == paths


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        ([], True),
        (["trainer.max_steps=99"], True),
        (["trainer.log_every=7"], True),
        (["optimizer.lr=1e-3"], True),  # the recorded value
        # The default, which an earlier version did not record.
        (["optimizer.weight_decay=0.1"], True),
        (["optimizer.weight_decay=0.2"], False),
        (["optimizer.lr=2e-3"], False),
        (["run.seed=4"], False),
        (["ddp.reduction=canonical", "trainer.micro_batch_size=3"], False),
        (["model=gpt_nano"], False),
    ],
)
def test_the_run_continues_unless_a_change_affects_its_results(words, goes_on, tmp_path):
    run = recorded(tmp_path, "optimizer.lr=1e-3", name="sweep/lr=1", run__name="sweep/lr=1")
    values = yaml.safe_load(Path(run, "config.yaml").read_text())
    del values["optimizer"]["weight_decay"]
    Path(run, "config.yaml").write_text(yaml.safe_dump(values))
    config = composed(run, *words)
    assert config["run"]["root"] == str(tmp_path)
    assert config["run"]["name"] == ("sweep/lr=1" if goes_on else None)


def test_command_line_values_are_compared_as_hydra_parses_them(tmp_path):
    """A report prints such a line for a run that starts from weights at a URL."""
    run = recorded(tmp_path, run__init_from="s3://weights/a b")
    same = ['run.init_from="s3://weights/a b"', "optimizer.betas=[0.9,0.99]", "model.bias=False"]
    assert composed(run, *same)["run"]["name"] == "run"
    assert composed(run, *same, "optimizer.betas=[0.9,0.98]")["run"]["name"] is None


def test_a_preset_from_the_command_line_replaces_the_recorded_group(tmp_path):
    run = recorded(tmp_path, "tracker.project=old", "ddp.backend=nccl", "trainer.log_every=7")
    config = composed(run, "tracker=mlflow", "ddp=gloo", "trainer=default")
    assert (config["tracker"]["mlflow"], config["tracker"]["project"]) == (True, "mingpt_ddp")
    assert config["ddp"]["backend"] == "gloo"
    assert config["trainer"]["log_every"] != 7


def test_one_limit_and_one_batch_size(tmp_path):
    run = recorded(tmp_path, "trainer.max_steps=50", "trainer.batch_size=8")
    trainer = composed(run, "trainer.max_epochs=3")["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == (3, None)
    assert composed(run, "trainer.batch_size_per_rank=4")["trainer"]["batch_size_per_rank"] == 4


def test_keys_that_a_stranger_could_misuse_are_dropped_unless_given_on_the_command_line(
    tmp_path, capsys
):
    theirs = {
        "snapshot__path": "s3://theirs/x",
        "run__resume": "http://theirs/y",
        "tracker__entity": "theirs",
        "tracker__uri": "/home/theirs",
        "data__path": "/tmp/a::b",
        "data__cache_dir": "/home/x",
    }
    run = recorded(tmp_path, **theirs)
    config = composed(run, "data.path=mine.txt")
    for key, value in theirs.items():
        group, _, key = key.partition("__")
        assert config[group][key] != value, key
    logged = capsys.readouterr().err
    assert logged.count("\n") == 1 and "snapshot.path=s3://theirs/x" in logged
    words = ["data.path=mine.txt", "snapshot.path=s3://mine/x"]
    assert composed(run, *words)["snapshot"]["path"] == "s3://mine/x"


def test_a_recorded_date_is_read_as_text(tmp_path):
    run = recorded(tmp_path, data__name=datetime.date(2020, 1, 1))
    assert composed(run)["data"]["name"] == "2020-01-01"


@pytest.mark.parametrize(("recorded_keys", "format"), [({}, "text"), ({"format": "auto"}, "auto")])
def test_a_text_is_read_as_the_recording_version_read_it(recorded_keys, format, tmp_path):
    """Versions without data.format read JSON Lines as text, and files that are now skipped."""
    values = configure("run.name=run")
    del values["data"]["format"]
    values["data"] |= recorded_keys
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert composed(str(tmp_path))["data"]["format"] == format


CODE = """
from dataclasses import dataclass
from mingpt_ddp.registry import ModelConfig, register

@dataclass(frozen=True, kw_only=True)
class LSTMConfig(ModelConfig):
    cells: int = 1

@register("model", "lstm", LSTMConfig)
class LSTM:
    pass
"""


def test_user_code_must_be_named_on_the_command_line(tmp_path):
    """Either its preset or its `code` key will do. Otherwise one line names all words to add."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "mine.py").write_text(CODE)
    (tmp_path / "mine" / "model" / "lstm.yaml").write_text("architecture: lstm\ncode: mine.py\n")
    run = recorded(tmp_path)
    values = yaml.safe_load(Path(run, "config.yaml").read_text())
    values["model"] = {"name": "a", "architecture": "lstm", "code": "mine.py", "cells": 3}
    Path(run, "config.yaml").write_text(yaml.safe_dump(values))
    assert refusal(run).endswith(": --config-dir=DIR model.code=mine.py")
    source = {"provider": "command-line", "path": str(tmp_path / "mine")}
    hydra = {"job": {"config_name": "config"}, "runtime": {"config_sources": [source]}}
    Path(run, ".hydra").mkdir()
    Path(run, ".hydra", "hydra.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    advice = shlex.split(refusal(run).partition("command line: ")[2])
    assert advice == [f"--config-dir={tmp_path}/mine", "model.code=mine.py"]
    for word in ("model=lstm", advice[1]):
        model = composed(run, word, presets=tmp_path / "mine")["model"]
        assert model["code"] == "mine.py"
        assert (model["architecture"], model["cells"]) == ("lstm", 3)


ODD_KEY = "model: {architecture: mine, 'code ': x}\nrun: {}\noptimizer: {}\ndata: {}\ntrainer: {}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.yaml of a run"),
        ("", "has no config.yaml of a run"),
        ("model: {architecture: gpt}", "has no config.yaml of a run"),
        (ODD_KEY, "has the key 'model.code '"),
    ],
)
def test_other_directories_are_refused(content, message, tmp_path):
    if content is None:
        (tmp_path / "config.yaml").symlink_to("config.yaml")
    else:
        (tmp_path / "config.yaml").write_text(content)
    error = refusal(str(tmp_path))
    assert message in error
