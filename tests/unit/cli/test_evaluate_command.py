"""The evaluate command on small snapshots: which text it uses, and which runs it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from multiprocess.ranks import configure
from snapshot_helpers import filled, model_snapshot
from tools import call_tool

from mingpt_ddp.cli.commands import evaluate

TEXT = "abc cab\nbca bb a\n" * 30
SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()
SMALL = ["model=gpt_nano", "model.n_layer=2", "model.n_embd=12", "data.block_size=8"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that calls the command in a directory that contains a.txt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("a.txt").write_text(TEXT)
    tool = call_tool(evaluate, monkeypatch, capsys)
    return lambda *words: tool(*words, "device=cpu", "precision=fp32")


@pytest.fixture
def measure(call):
    """Return a function that evaluates runs. It returns the metrics of each."""

    def measure(*words: str) -> list[dict[str, Any]]:
        code, out, err = call(*words)
        assert code == 0, err
        shown = json.loads(out)
        return shown.get("runs", [shown])

    return measure


def recorded(name: str, step: int, *overrides: str, sha256: str = SHA256, **state: Any) -> str:
    """Write a run with this configuration and a snapshot of this step."""
    config = configure(*SMALL, "data.path=a.txt", *overrides)
    text = {"sha256": sha256, "length": len(TEXT)}
    filled(name, model_snapshot(step, **{"config": config, "text": text, **state}))
    return name


def refusal(answer: tuple[int, str, str]) -> str:
    code, out, err = answer
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def test_every_run_is_measured_on_the_split_of_the_first(measure):
    recorded("first", 4, "data.train_split=0.8")
    recorded("moved", 8, "data.train_split=0.5", "data.path=moved.txt")
    recorded("alike", 8, "data.train_split=0.8")
    _, moved = measure("first", "moved")
    [alike] = measure("alike")
    [other] = measure("alike", "split=test", "data.path=a.txt")
    assert moved["loss"] == alike["loss"] != other["loss"]


def test_all_of_the_split_is_measured(measure):
    recorded("some", 4, "trainer.eval_steps=1", "trainer.batch_size=1")
    recorded("all", 4)
    assert measure("some")[0]["loss"] == measure("all")[0]["loss"]


def test_runs_of_different_tasks_are_refused(call, measure):
    recorded("text", 4)
    recorded("digits", 4, config=configure("experiment=digits_convnet"))
    expected = "of digits cannot be evaluated: task.name=classification cannot be compared with"
    assert expected in refusal(call("text", "digits"))
    older = configure(*SMALL, "data.path=a.txt")
    del older["task"]  # earlier versions did not record this group
    recorded("older", 4, config=older)
    first, second = measure("text", "older")
    assert first["loss"] == second["loss"]


def test_runs_of_other_data_are_refused(call, measure):
    recorded("one", 4)
    recorded("two", 8, sha256="5e" * 32)
    expected = "its data differs from the data of one; measure it alone, or measure all"
    assert expected in refusal(call("one", "two"))
    assert len(measure("one", "two", "data.path=a.txt")) == 2


@pytest.mark.parametrize(
    "config", [None, {}, {"data": 1}, {"data": {"path": 1}, "task": 7}, {"task": {}}], ids=str
)
def test_a_hostile_state_is_refused_in_one_line(config, call):
    recorded("hostile", 4, config=config)
    recorded("honest", 4)
    for runs in (["hostile", "honest"], ["honest", "hostile"]):
        assert "the snapshot of hostile cannot be evaluated: " in refusal(call(*runs))
