"""Check that a run detects the format of its data, logs it, and keeps it on resume."""

from __future__ import annotations

import json

from launching import TINY, python_main
from runs import fail, succeed, tool, write_files

SMALL = [*TINY, "data.truncate=1"]
TEXTS = [f"to be {i}, or not" for i in range(400)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
READER = """
import json
from collections.abc import Iterator

from mingpt_ddp.registry import DataConfig, register


@register("data", "chats", DataConfig)
def chats(config: DataConfig) -> Iterator[str]:
    with open(str(config.path), encoding="utf-8") as file:
        for line in file:
            for turn in json.loads(line)["turns"]:
                yield turn + "\\n"
"""
PRESET = "defaults: [text_file]\nname: chats\nreader: chats\ncode: mine.py\n"
CHATS = "".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS)


def test_a_run_with_format_text_resumes_without_the_key(tmp_path):
    """The second run starts from the weights of the first."""
    (tmp_path / "docs.jsonl").write_text(JSONL)
    text = ["data=text_file", "data.path=docs.jsonl"]
    for name, source in (("first", []), ("second", ["run.init_from=outputs/first"])):
        command = [*python_main(), *SMALL, *text, *source, f"run.name={name}"]
        succeed([*command, "trainer.max_steps=2", "data.format=text"], tmp_path)
        printed = succeed([*command, "trainer.max_steps=4"], tmp_path)
        assert "resuming from the snapshot" in printed
        result = json.loads((tmp_path / "outputs" / name / "result.json").read_text())
        assert result["step"] == 4


def test_a_run_keeps_the_format_that_its_first_start_has_detected(tmp_path):
    """The user's configuration says auto. The snapshot contains the format that was detected."""
    (tmp_path / "docs.jsonl").write_text(JSONL)
    (tmp_path / "other.txt").write_text(TEXTS[0] * 9)
    command = [*python_main(), *SMALL, "data=text_file", "data.path=docs.jsonl", "run.name=a"]
    begun = succeed([*command, "trainer.max_steps=2"], tmp_path)
    line = "data.path=docs.jsonl: read with data.format=jsonl, 400 texts of data.column=text"
    assert line in begun
    refused = fail([*command, "trainer.max_steps=4", "data.format=text"], tmp_path)
    line = "config error: data.format=text: the run has read its texts with data.format=json"
    assert line in refused
    printed = succeed([*command, "trainer.max_steps=4", "data.format=auto"], tmp_path)
    assert "resuming from the snapshot" in printed
    other = tool("evaluate", "outputs/a", "data_path=other.txt")
    succeed(other, tmp_path)


def test_sources_need_no_path(tmp_path):
    (tmp_path / "a.txt").write_text("to be, or not to be\n" * 200)
    sources = ["data=text_file", "data.sources=[[a.txt,1]]", "trainer.max_steps=1"]
    succeed([*python_main(), *SMALL, *sources, "run.name=mixed"], tmp_path)


def test_a_users_reader(tmp_path):
    """One reader takes its file from data.path. The other has a constant path instead."""
    files = {
        "chats.jsonl": CHATS,
        "my_reader/mine.py": READER,
        "my_reader/data/chats.yaml": PRESET,
        "my_reader/fixed.py": READER.replace("config.path", "'chats.jsonl'"),
        "my_reader/data/fixed.yaml": PRESET.replace("mine.py", "fixed.py"),
    }
    write_files(tmp_path, files)
    presets = "--config-dir=my_reader"
    for each in ([presets, "data=chats", "data.path=chats.jsonl"], [presets, "data=fixed"]):
        text = succeed([*python_main(), *SMALL, *each, "trainer.max_steps=1"], tmp_path)
        # The 19 characters are the digits, "tobe,rn", a space and a line feed.
        assert ", 19 distinct" in text, text
