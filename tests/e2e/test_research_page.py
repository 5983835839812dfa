"""Check the changes in docs/research.md, with all code in one file and all commands in one run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from example_files import EXAMPLES
from launching import ROOT, TINY, python_main
from runs import read_result, succeed, train, weights, write_files
from safetensors.torch import load

import mingpt_ddp

PAGE = (ROOT / "docs" / "research.md").read_text()
MAX_LINES = 10
ENGLISH = "The value of a note is what it says."
# Commands that select another task or reader than an earlier command.
ALONE = {"task.name=by_character", "task.name=frozen", "data.reader=english"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def project(tmp_path) -> Path:
    """Make a directory with a file of all code blocks, and the data that the commands name."""
    imports, *changes, _ = blocks("python")
    rows = [{"lang": "en", "text": ENGLISH}, {"lang": "de", "text": "Größe"}] * 400
    files = {
        "research/mine.py": "\n\n".join([imports, *changes]),
        "notes.txt": f"{ENGLISH}\n" * 400,
        "rows.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
    }
    return write_files(tmp_path, files)


def words_of(key: str) -> list[str]:
    """Return the arguments of the command that contains this argument."""
    [command] = [each for each in blocks("sh") if key in shlex.split(each)]
    return [*TINY, *shlex.split(command)[2:], "data.truncate=1"]


def test_blocks_are_short():
    _, *changes, loop = blocks("python")
    assert all(
        len([*filter(None, change.splitlines())]) <= MAX_LINES for change in [*changes, loop]
    )
    assert len(changes) + 1 == PAGE.count("\n## ")


def test_changes_train_together(project):
    """Run all commands as one, except for those that select another task or reader."""
    words: list[str] = []
    for command in blocks("sh"):
        program, script, *overrides = shlex.split(command)
        assert (program, script) == ("python", "main.py")
        if not ALONE & {*overrides}:
            words += [word for word in overrides if word not in words]
    text = succeed([*python_main(), *TINY, *words, "data.truncate=1", "run.name=run"], project)
    assert "sign_sgd: lr 0.0003" in text
    run = project / "outputs" / "run"
    assert {"train_largest_weight", "val_spaces"} <= read_result(run).keys()
    assert "train_loss_z" in (run / "metrics.jsonl").read_text()


def test_a_metric_about_characters(project):
    words = [*words_of("task.name=by_character"), "data=text_file", "data.path=notes.txt"]
    result = read_result(train(project, *words, "ddp.nproc_per_node=2"))
    assert 0 <= result["val_capitals_right"] <= 1
    classes = (result["val_spaces_right"], result["val_capitals_right"])
    assert any(value != result["val_accuracy"] for value in classes)


def test_a_reader_of_some_rows_with_end_tokens(project):
    run = train(project, *words_of("data.reader=english"))
    sampled = mingpt_ddp.load(run)
    assert sampled.tokenizer.end is not None
    assert set(ENGLISH) == set(sampled.tokenizer.decode(range(sampled.tokenizer.end)))


def test_frozen_weights_keep_their_bytes(project):
    """This holds with weight decay, on two ranks and after a restart."""
    words = [*words_of("task.name=frozen"), "optimizer.weight_decay=0.5", "snapshot.keep_last=9"]
    train(project, *words, "ddp.nproc_per_node=2", "trainer.max_steps=4")
    run = train(project, *words, "ddp.nproc_per_node=2")
    first, last = load(weights(run, 4)), load(weights(run, 12))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    frozen = {name for name in first if name.startswith("blocks.0.")}
    assert frozen and changed == first.keys() - frozen


def test_a_users_loop(tmp_path, monkeypatch):
    source = (EXAMPLES / "train.py").read_text()
    clip = "            norm = step.clip()\n"
    assert source.count(clip) == 1
    changed = "".join(f"            {line}\n" for line in blocks("python")[-1].splitlines())
    example = {"__name__": "example"}
    exec(f"import torch\n{source.replace(clip, changed + clip)}", example)
    monkeypatch.chdir(tmp_path)
    settings = example["SETTINGS"]
    settings["trainer"] |= {"max_steps": 3, "device": "cpu"}
    assert example["train"](example["from_mapping"](settings)).step == 3
