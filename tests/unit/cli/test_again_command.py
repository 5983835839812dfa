"""The command line that trains a recorded run again."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from multiprocess.ranks import configure

from mingpt_ddp.cli.commands.again import command_words
from mingpt_ddp.errors import ConfigError


def recorded(root: Path, *overrides: str, name: str = "run", **changes: Any) -> str:
    """Write the configuration that a run would record; return its directory."""
    values = configure(*overrides)
    for key, value in changes.items():
        group, _, key = key.partition("__")
        values[group][key] = value
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(yaml.safe_dump(values))
    return str(root / name)


EXPERIMENTS = [
    "demo",
    "shakespeare_char_cpu_long",
    "shakespeare_char_best",
    "shakespeare_bpe_cpu",
]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_words_compose_to_the_recorded_configuration(experiment, tmp_path):
    own = ["trainer.max_epochs=7", "run.seed=5", "model.name='a b=\"c'", "tracker=[mlflow]"]
    run = recorded(tmp_path, f"experiment={experiment}", *own)
    expected = configure(f"experiment={experiment}", *own, f"run.root={tmp_path}", "run.name=run")
    assert configure(*command_words(run, [])) == expected


def test_a_mapping_is_taken_literally(tmp_path):
    """Also what Hydra would replace by a variable of the environment."""
    paths = {"wiki": "my wiki.txt", "odd": "${oc.env:HOME},{a: 'b\"}"}
    assert composed(recorded(tmp_path, data__val_paths=paths))["data"]["val_paths"] == paths


def composed(run: str, *typed: str) -> dict[str, Any]:
    return configure(*command_words(run, list(typed)))


@pytest.mark.parametrize(
    ("typed", "goes_on"),
    [
        ([], True),
        (["trainer.max_steps=99"], True),
        (["optimizer.lr=1e-3"], True),  # the recorded value
        (["optimizer.lr=2e-3"], False),
        (["run.seed=4"], False),
        (["model=gpt_nano"], False),
    ],
)
def test_the_run_goes_on_unless_its_numbers_change(typed, goes_on, tmp_path):
    run = recorded(tmp_path, "optimizer.lr=1e-3", name="sweep/lr=1", run__name="sweep/lr=1")
    config = composed(run, *typed)
    assert config["run"]["root"] == str(tmp_path)
    assert config["run"]["name"] == ("sweep/lr=1" if goes_on else None)


def test_one_limit_and_one_batch_size(tmp_path):
    run = recorded(tmp_path, "trainer.max_steps=50", "trainer.batch_size=8")
    trainer = composed(run, "trainer.max_epochs=3")["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == (3, None)
    words = command_words(run, ["trainer.batch_size_per_rank=4"])
    assert not any(word.startswith("trainer.batch_size=") for word in words)


def test_what_a_stranger_could_misuse_is_left_out_unless_it_is_typed(tmp_path, capsys):
    changes = {
        "snapshot__path": "s3://theirs/x",
        "run__resume": "http://theirs/y",
    }
    changes |= {"tracker__entity": "theirs", "tracker__uri": "/home/theirs"}
    run = recorded(
        tmp_path,
        **changes,
        data__path="/tmp/a::b",
        data__cache_dir="/home/x",
    )
    words = command_words(run, [])
    assert not any(word in " ".join(words) for word in ("theirs", "::", "/home/x", "code"))
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "snapshot.path=s3://theirs/x" in line
    assert "snapshot.path=s3://mine/x" in command_words(run, ["snapshot.path=s3://mine/x"])


def test_a_date_that_somebody_has_typed_is_a_text(tmp_path):
    config = configure("run.name=run")
    config["data"]["name"] = datetime.date(2020, 1, 1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert "data.name='2020-01-01'" in [
        w.replace('"', "'") for w in command_words(str(tmp_path), [])
    ]


def test_a_loop_of_links_is_no_run(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"has no config\.yaml of a run"):
        command_words(str(tmp_path / "loop"), [])


def test_code_of_yours_needs_its_preset(tmp_path):
    run = recorded(tmp_path, model__architecture="lstm", model__code="mine.py")
    with pytest.raises(
        ConfigError, match=r"model.architecture=lstm is in code of yours; type .* model=NAME"
    ):
        command_words(run, [])
    words = command_words(run, ["--config-dir=mine", "model=lstm", "optimizer.lr=1"])
    assert "++model.n_layer=4" in words, "the recorded keys of the preset"
    assert words[-3:] == ["--config-dir=mine", "model=lstm", "optimizer.lr=1"]


def test_code_of_yours_is_typed(tmp_path):
    """One line has all the words, before anything is printed."""
    run = recorded(tmp_path, model__activation="mine", model__code="mine.py")
    with pytest.raises(ConfigError, match=r"with --config-dir=DIR model.code=mine.py$"):
        command_words(run, [])
    source = {"provider": "command-line", "path": "/my recipe"}
    hydra = {"job": {"config_name": "config"}, "runtime": {"config_sources": [source]}}
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    with pytest.raises(ConfigError, match=r"with '--config-dir=/my recipe' model.code=mine.py$"):
        command_words(run, [])
    typed = ["--config-dir=/my recipe", "model.code=mine.py"]
    assert command_words(run, typed)[-2:] == typed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no config.yaml of a run"),
        ("model: {architecture: gpt}", "has no config.yaml of a run"),
        (
            "model: {architecture: mine, 'code ': x}\nrun: {}\noptimizer: {}\ndata: {}\n"
            "trainer: {}",
            "has the key 'code '",
        ),
    ],
)
def test_other_directories_are_refused(content, message, tmp_path):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        command_words(str(tmp_path), [])
