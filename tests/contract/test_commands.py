"""Check the command line: help, one-line errors for bad input, and the names of unnamed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .contract import (
    AT,
    MAIN,
    REPORT,
    SAMPLE,
    SNAPSHOTS,
    call,
    one_error_line,
    result,
    settings,
    succeed,
    torchrun,
    write_text,
)

pytestmark = pytest.mark.timeout(600)

DIVISIBLE = "config error: model.n_embd=64 must be divisible by model.n_head=5"
# Overrides of main.py after those of a valid run, and the text that the error line has to contain.
BAD = [
    ("model.n_embd=64 model.n_head=5", DIVISIBLE),
    ("trainer.max_epoch=5", "trainer.max_epochs"),
    ("trainer.max_steps=many", "trainer.max_steps"),
    ("trainer.batch_size=12 trainer.micro_batch_size=5", "trainer.micro_batch_size=5"),
    ("trainer.max_steps=null", "trainer.max_steps"),
    ("optimizer.lr=-1", "optimizer.lr=-1"),
    ("optimizer=adamv", "adamv"),
    ("model=gpt_nan", "gpt_nan"),
    ("data.path=nowhere.txt", "nowhere.txt"),
    ("data.train_split=1", "data.train_split"),
    ("snapshot.keep_last=0", "snapshot.keep_last=0"),
    ("run.name=../elsewhere", "../elsewhere"),
    ("optimizer.lr=1e-3,1e-4", "optimizer.lr"),
    ("modle.n_layer=2", "modle"),
    ("ddp.bucket_cap_mb=0", "ddp.bucket_cap_mb"),
    ("ddp.nproc_per_node=2 model.n_embd=64 model.n_head=5", DIVISIBLE),
]


@pytest.mark.parametrize("overrides, named", BAD, ids=[overrides for overrides, _ in BAD])
def test_bad_input(overrides: str, named: str, text: Path, tmp_path: Path) -> None:
    done = call([*MAIN, *settings(text), *overrides.split()], tmp_path)
    assert done.returncode == 2, done.stdout
    line = one_error_line(done.stdout)
    assert named in line
    assert line == DIVISIBLE or named != DIVISIBLE
    assert list(tmp_path.iterdir()) == [], "something was written"


def test_bad_input_under_torchrun(text: Path, tmp_path: Path) -> None:
    """The agent exits with code 1. Exactly one worker of all attempts prints the error, as its last line."""
    logs, cwd = tmp_path / "logs", tmp_path / "cwd"
    cwd.mkdir()
    command = torchrun(2, "--max_restarts=1", f"--log-dir={logs}", "--redirects=3")
    done = call([*command, *settings(text), "model.n_embd=64", "model.n_head=5"], cwd)
    assert done.returncode == 1, done.stdout
    outputs = [path.read_text().splitlines() for path in logs.rglob("std*.log")]
    assert sum(lines.count(DIVISIBLE) for lines in outputs) == 1, outputs
    assert all(lines[-1] == DIVISIBLE for lines in outputs if DIVISIBLE in lines), outputs
    assert not any("Traceback" in line for lines in outputs for line in lines), outputs
    assert list(cwd.iterdir()) == [], "something was written"


@pytest.mark.parametrize(
    "command", [SAMPLE, SNAPSHOTS, REPORT, [*AT, "step=1"]], ids=["sample.py", "snapshots", "report", "at"]
)
def test_bad_arguments_of_the_other_commands(command: list[str], tmp_path: Path) -> None:
    verb = ["list"] if command is SNAPSHOTS else []
    argument = "snapshot=nowhere" if command is SAMPLE else "nowhere"
    done = call([*command, *verb, argument], tmp_path)
    assert done.returncode == 2, done.stdout
    assert "nowhere" in one_error_line(done.stdout)
    assert list(tmp_path.iterdir()) == [], "something was written"


@pytest.mark.parametrize(
    "words, named",
    [
        ("", "step"),
        ("step=0", "step=0"),
        ("step=best", "step='best'"),
        ("step=1 without=0", "without=0"),
        ("step=1 format=xml", "format='xml'"),
        ("step=1 stop=2", "stop"),
    ],
)
def test_bad_keys_of_at(words: str, named: str, tmp_path: Path) -> None:
    done = call([*AT, "outputs/run", *words.split()], tmp_path)
    assert done.returncode == 2, done.stdout
    assert named in one_error_line(done.stdout)


@pytest.mark.parametrize(
    "command",
    [MAIN, SAMPLE, SNAPSHOTS, REPORT, AT],
    ids=["main.py", "sample.py", "snapshots", "report", "at"],
)
def test_help(command: list[str], tmp_path: Path) -> None:
    assert len(succeed([*command, "--help"], tmp_path).splitlines()) > 3
    assert list(tmp_path.iterdir()) == [], "something was written"


# Users have runs with these names on their disks. If the names changed, these runs would start again at step 0.
PINNED = {
    "gpt": "text_file-gpt_nano-2b486a81",
    "modern": "text_file-modern_nano-1a5ea9f7",
}


def test_names_of_unnamed_runs(tmp_path: Path) -> None:
    """The name depends only on the configuration. Limits, display settings and the machine do not change it."""
    write_text(tmp_path / "text.txt", 6000)
    keys = dict(model__dropout=0.1, trainer__max_steps=1, optimizer__schedule_steps=80, run__name="null")
    gpt = settings("text.txt", **keys)
    modern = [*settings("text.txt", **keys, model="modern_nano"), "optimizer=muon"]

    def train(overrides: list[str]) -> str:
        """Train with these overrides. Return the name of the run directory that was created or resumed."""
        for path in (tmp_path / "outputs").glob("*/result.json"):
            path.unlink()
        succeed([*MAIN, *overrides], tmp_path)
        (path,) = (tmp_path / "outputs").glob("*/result.json")
        assert re.fullmatch(r"text_file-\w+-[0-9a-f]{8}", path.parent.name)
        return path.parent.name

    name = train(gpt)
    limits = ["trainer.max_steps=3", "trainer.log_every=2", "trainer.eval_every=2", "snapshot.every_steps=1"]
    assert train([*gpt, *limits]) == name
    assert result(tmp_path / "outputs" / name)["step"] == 3, "a larger limit does not resume the run"
    assert train([*gpt, "optimizer.lr=2e-3"]) != name
    names = {"gpt": name, "modern": train(modern)}
    assert names == PINNED
