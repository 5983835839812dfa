"""What a command line is answered with: help, refusals in one line, the name of an unnamed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .contract import (
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
# Words for main.py behind those of a good run, and what the line has to name.
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


@pytest.mark.parametrize("words, named", BAD, ids=[words for words, _ in BAD])
def test_bad_input(words: str, named: str, text: Path, tmp_path: Path) -> None:
    done = call([*MAIN, *settings(text), *words.split()], tmp_path)
    assert done.returncode == 2, done.stdout
    line = one_error_line(done.stdout)
    assert named in line
    assert line == DIVISIBLE or named != DIVISIBLE
    assert list(tmp_path.iterdir()) == [], "something was written"


def test_bad_input_under_torchrun(text: Path, tmp_path: Path) -> None:
    """The agent's exit code is 1; of all workers and restarts one says the error, as its last line."""
    logs, cwd = tmp_path / "logs", tmp_path / "cwd"
    cwd.mkdir()
    command = torchrun(2, "--max_restarts=3", f"--log-dir={logs}", "--redirects=3")
    done = call([*command, *settings(text), "model.n_embd=64", "model.n_head=5"], cwd)
    assert done.returncode == 1, done.stdout
    said = [path.read_text().splitlines() for path in logs.rglob("std*.log")]
    assert sum(lines.count(DIVISIBLE) for lines in said) == 1, said
    assert all(lines[-1] == DIVISIBLE for lines in said if DIVISIBLE in lines), said
    assert not any("Traceback" in line for lines in said for line in lines), said
    assert list(cwd.iterdir()) == [], "something was written"


@pytest.mark.parametrize(
    "command", [SAMPLE, SNAPSHOTS, REPORT], ids=["sample.py", "mingpt_ddp.snapshots", "mingpt_ddp.report"]
)
def test_bad_words_for_the_other_commands(command: list[str], tmp_path: Path) -> None:
    verb = ["list"] if command is SNAPSHOTS else []
    place = "snapshot=nowhere" if command is SAMPLE else "nowhere"
    done = call([*command, *verb, place], tmp_path)
    assert done.returncode == 2, done.stdout
    assert "nowhere" in one_error_line(done.stdout)
    assert list(tmp_path.iterdir()) == [], "something was written"


@pytest.mark.parametrize(
    "command",
    [MAIN, SAMPLE, SNAPSHOTS, REPORT],
    ids=["main.py", "sample.py", "mingpt_ddp.snapshots", "mingpt_ddp.report"],
)
def test_help(command: list[str], tmp_path: Path) -> None:
    assert len(succeed([*command, "--help"], tmp_path).splitlines()) > 3
    assert list(tmp_path.iterdir()) == [], "something was written"


# The names of runs that are already on users' disks: a change makes these begin again at step 0.
PINNED = {
    "gpt": "text_file-gpt_nano-2b486a81",
    "modern": "text_file-modern_nano-1a5ea9f7",
}


def test_names_of_unnamed_runs(tmp_path: Path) -> None:
    """A function of the configuration alone: no limits, no display, nothing of this machine."""
    write_text(tmp_path / "text.txt", 6000)
    keys = dict(model__dropout=0.1, trainer__max_steps=1, optimizer__schedule_steps=80, run__name="null")
    gpt = settings("text.txt", **keys)
    modern = [*settings("text.txt", **keys, model="modern_nano"), "optimizer=muon"]

    def train(words: list[str]) -> str:
        """The name of the run directory that appeared or was gone on with."""
        for path in (tmp_path / "outputs").glob("*/result.json"):
            path.unlink()
        succeed([*MAIN, *words], tmp_path)
        (path,) = (tmp_path / "outputs").glob("*/result.json")
        assert re.fullmatch(r"text_file-\w+-[0-9a-f]{8}", path.parent.name)
        return path.parent.name

    name = train(gpt)
    longer = ["trainer.max_steps=3", "trainer.log_every=2", "trainer.eval_every=2", "snapshot.every_steps=1"]
    assert train([*gpt, *longer]) == name
    assert result(tmp_path / "outputs" / name)["step"] == 3, "a larger limit goes on"
    assert train([*gpt, "optimizer.lr=2e-3"]) != name
    names = {"gpt": name, "modern": train(modern)}
    assert names == PINNED
