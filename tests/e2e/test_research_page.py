"""The changes of docs/research.md: all blocks in one file of a user, all commands in one run."""

from __future__ import annotations

import re
import shlex

from example_files import EXAMPLES
from launching import ROOT, TINY, python_main
from runs import read_result, succeed

PAGE = (ROOT / "docs" / "research.md").read_text()
MAX_LINES = 10


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_all_changes_train_together(tmp_path):
    imports, *changes, loop = blocks("python")
    assert all(
        len([*filter(None, change.splitlines())]) <= MAX_LINES for change in [*changes, loop]
    )
    assert len(changes) + 1 == PAGE.count("\n## ")
    words: list[str] = []
    for command in blocks("sh"):
        program, script, *overrides = shlex.split(command)
        assert (program, script) == ("python", "main.py")
        words += [word for word in overrides if word not in words]
    (tmp_path / "research").mkdir()
    (tmp_path / "research" / "mine.py").write_text("\n\n".join([imports, *changes]))
    (tmp_path / "notes.txt").write_text("The value of a note is what it says.\n" * 400)
    text = succeed([*python_main(), *TINY, *words, "data.truncate=1", "run.name=run"], tmp_path)
    assert "sign_sgd: lr 0.0003" in text
    run = tmp_path / "outputs" / "run"
    assert {"train_largest_weight", "val_spaces"} <= read_result(run).keys()
    assert "train_loss_z" in (run / "metrics.jsonl").read_text()


def test_the_loop_of_ones_own(tmp_path, monkeypatch):
    source = (EXAMPLES / "train.py").read_text()
    clip = "        norm = step.clip()\n"
    assert source.count(clip) == 1
    changed = "".join(f"        {line}\n" for line in blocks("python")[-1].splitlines())
    example = {"__name__": "example"}
    exec(f"import torch\n{source.replace(clip, changed + clip)}", example)
    monkeypatch.chdir(tmp_path)
    settings = example["SETTINGS"]
    settings["trainer"] |= {"max_steps": 3, "device": "cpu"}
    assert example["train"](example["from_mapping"](settings)).step == 3
