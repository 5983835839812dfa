"""What a report ranks jobs by, and what it says of jobs that do not compare."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_run

from mingpt_ddp.results.groups import replicates
from mingpt_ddp.results.report import report
from mingpt_ddp.results.runs import read_jobs

RANKED = "note: ranked by bits per byte: losses per token of different tokenizers do not compare"
DIFFERENT_TASKS = "the jobs have different tasks, each of which defines its own loss (task.name)"


def notes(directory: Path) -> list[str]:
    """Return the notes of the table, which are those of the page."""
    lines = report([directory], directory / "page.html").splitlines()
    found = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    page = unescape((directory / "page.html").read_text())
    section = re.search("<h2>Comparison</h2><ul><li>(.*?)</li></ul>", page)
    items = section[1].split("</li><li>") if section else []
    verdict = [item for item in items if item.startswith("nothing can be said")]
    assert items == found + verdict
    return found


def figures(page: Path) -> list[dict[str, Any]]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1])


# Different tokenizers


@pytest.fixture
def tokenizers(tmp_path) -> Path:
    """Char has the lower loss, BPE the fewer bits per byte.

    A run without them, and one that is not complete.
    """
    for name, loss, bits in (("char", 3.3, 4.75), ("bpe", 7.04, 3.5), ("byte", 2.0, None)):
        keys = {"data.tokenizer": name, "data.vocab_size": None}
        fake_run(tmp_path / "sweep" / name, keys, val_loss=loss, bits_per_byte=bits)
    pruned = {"data.tokenizer": "bpe", "data.vocab_size": 300}
    fake_run(tmp_path / "sweep" / "pruned", pruned, "pruned", val_loss=1.0, bits_per_byte=1.0)
    return tmp_path / "sweep"


def test_the_table_is_ranked_by_bits_per_byte(tokenizers):
    lines = report([tokenizers], tokenizers / "page.html").splitlines()
    expected = [
        [
            "bits_per_byte",
            "status",
            "tokenizer",
            "vocab_size",
            "step",
            "tokens/s",
            "faults",
            "time",
            "val",
            "loss",
        ],
        [
            "*",
            "3.5000",
            "complete",
            "bpe",
            "null",
            "100",
            "40,000",
            "0",
            "0:01:02",
            "7.0400",
            "bpe",
        ],
        ["4.7500", "complete", "char", "null", "100", "40,000", "0", "0:01:02", "3.3000", "char"],
        ["(1.0000)", "pruned", "bpe", "300", "100", "40,000", "0", "0:01:02", "1.0000", "pruned"],
        ["-", "complete", "byte", "null", "100", "40,000", "0", "0:01:02", "2.0000", "byte"],
    ]
    assert [line.split() for line in lines[:5]] == [[*expected[0], "job"], *expected[1:]]
    assert lines[5:8] == [
        RANKED,
        "note: without bits per byte, so not ranked: byte",
        f"best: {tokenizers / 'bpe'}",
    ]


def test_the_page_is_of_bits_per_byte(tokenizers):
    report([tokenizers], tokenizers / "page.html")
    page = (tokenizers / "page.html").read_text()
    assert "Bits per byte 3.5000, validation loss 7.0400, tokenizer: bpe, vocab size: null." in page
    assert (
        "<th><button>bits per byte</button></th>" in page
        and "<th><button>validation loss</button></th>" in page
    )
    assert "Blue to orange: values from 3.500 to 4.750." in page
    curves, training, *against = figures(tokenizers / "page.html")
    assert curves["layout"]["title"]["text"] == "bits per byte"
    assert [trace["y"][-1] for trace in curves["data"]] == [1.0, 4.75, 3.5], (
        "of every job that has measured it"
    )
    assert "per token" in training["layout"]["title"]["text"]
    assert all(figure["layout"]["yaxis"]["title"]["text"] == "bits per byte" for figure in against)
    assert "#1</b> complete, bits per byte 3.5<" in json.dumps(curves)


def test_one_tokenizer_is_ranked_by_its_loss(tmp_path):
    for name, loss in (("a", 3.0), ("b", 2.0)):
        fake_run(
            tmp_path / name,
            {"data.tokenizer": "byte", "optimizer.lr": loss},
            val_loss=loss,
            bits_per_byte=9 - loss,
        )
    text = report([tmp_path], tmp_path / "page.html")
    assert f"best: {tmp_path / 'b'}" in text
    assert "bits" not in text and "note" not in text


def test_tokenizer_files_of_the_runs(tmp_path):
    """The same path, with another content."""
    for name, loss in (("a", 2.0), ("b", 3.0)):
        run = fake_run(
            tmp_path / name,
            {"data.tokenizer": "tokenizer.json"},
            val_loss=loss,
            bits_per_byte=9 - loss,
        )
        (run / "tokenizer.json").write_text(name)
    text = report([tmp_path], tmp_path / "page.html")
    assert f"best: {tmp_path / 'b'}" in text and RANKED in text
    (tmp_path / "b" / "tokenizer.json").write_text("a")
    assert f"best: {tmp_path / 'a'}" in report([tmp_path], tmp_path / "page.html")


def test_no_job_with_bits_per_byte(tmp_path):
    for name in ("char", "byte"):
        fake_run(tmp_path / name, {"data.tokenizer": name})
    text = report([tmp_path], tmp_path / "page.html")
    assert text.splitlines()[3:6] == [
        RANKED,
        "note: without bits per byte, so not ranked: byte, char",
        "no complete job has bits per byte",
    ]
    assert "<p>No complete job has bits per byte.</p>" in (tmp_path / "page.html").read_text()


# Results that do not compare


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"data.path": "b.txt"}, "data.path"),
        ({"data.truncate": 0.5}, "data.truncate"),
        ({"data.train_split": 0.5, "data.test_split": 0.1}, "data.train_split, data.test_split"),
        ({"data.sources": [["a.txt", 1.0]]}, "data.sources"),
        ({"data.path": "b.txt", "data.sha256": "2"}, "data.path, data.sha256"),
    ],
    ids=str,
)
def test_different_texts(tmp_path, changes, keys):
    fake_run(tmp_path / "a", {"data.sha256": "1"} if "data.sha256" in changes else {})
    fake_run(tmp_path / "b", changes)
    expected = f"the jobs were measured on different texts ({keys}): their results do not compare"
    assert notes(tmp_path) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.lr": 2},
        # the defaults of keys not recorded
        {"data.truncate": 1.0, "data.train_split": 0.9, "data.sources": None},
        {"data.sha256": "1", "data.path": "a/copy.txt"},
        {"data.sha256": None},
        {"data.cache_dir": "elsewhere", "data.name": "a label", "task.name": "language_model"},
    ],
    ids=str,
)
def test_equal_texts(tmp_path, changes):
    fake_run(tmp_path / "a", {"data.sha256": "1"} if "data.sha256" in changes else {})
    fake_run(tmp_path / "b", changes)
    assert notes(tmp_path) == []


def test_different_data(tmp_path):
    fake_run(tmp_path / "a")
    digits = {"data.dataset": "digits", "data.path": "elsewhere", "task.name": "classification"}
    fake_run(tmp_path / "b", digits)
    assert notes(tmp_path) == [
        "the jobs were measured on different data (data.dataset): their results do not compare",
        DIFFERENT_TASKS,
    ]


def test_tasks_on_one_text_are_not_on_different_texts(tmp_path):
    fake_run(tmp_path / "a")
    fake_run(tmp_path / "b", {"task.name": "zloss"})
    assert notes(tmp_path) == [DIFFERENT_TASKS]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"trainer.eval_steps": 5}, "trainer.eval_steps"),
        ({"trainer.eval_steps": None}, "trainer.eval_steps"),
        ({"trainer.batch_size": 24}, "trainer.eval_steps, trainer.batch_size"),
        ({"data.block_size": 32}, "trainer.eval_steps, data.block_size"),
        ({"trainer.batch_size": 24, "trainer.eval_steps": 5}, None),  # the same windows
    ],
    ids=str,
)
def test_different_parts_of_the_validation_split(tmp_path, changes, keys):
    fake_run(tmp_path / "a", {"trainer.eval_steps": 10})
    fake_run(tmp_path / "b", {"trainer.eval_steps": 10, **changes})
    expected = (
        f"the jobs were measured on different parts of the validation split ({keys}): "
        "their results do not "
    )
    assert notes(tmp_path) == ([f"{expected}compare exactly"] if keys else [])


def test_the_same_eval_steps_are_another_part_for_another_tokenizer(tmp_path):
    for name in ("char", "byte"):
        fake_run(
            tmp_path / name, {"data.tokenizer": name, "trainer.eval_steps": 10}, bits_per_byte=2.0
        )
    assert notes(tmp_path) == [
        RANKED.removeprefix("note: "),
        "the jobs were measured on different parts of the validation split "
        "(trainer.eval_steps, data.tokenizer): their "
        "results do not compare exactly",
    ]


def test_different_steps_of_complete_jobs(tmp_path):
    for steps in (200, 60, 100):
        fake_run(tmp_path / f"{steps}", {"trainer.max_steps": steps}, steps=steps)
    fake_run(tmp_path / "pruned", {"optimizer.lr": 2}, "pruned", steps=20)
    assert notes(tmp_path) == ["the jobs ran 60 to 200 steps"]


def test_equal_minutes_are_equal_settings(tmp_path):
    """However many steps they are: jobs that differ in their seed too are replicates."""
    minutes = {"trainer.max_minutes": 0.5, "trainer.max_steps": None, "trainer.max_epochs": None}
    for seed, steps in enumerate((200, 60)):
        config = minutes | {"run.seed": seed}
        fake_run(tmp_path / f"{seed}", config, steps=steps)
    assert len(replicates(read_jobs([tmp_path]))) == 1
    count = "which count as equal: each has trained for trainer.max_minutes=0.5"
    assert notes(tmp_path) == [f"the jobs ran 60 to 200 steps, {count}"]
    fake_run(tmp_path / "longer", minutes | {"trainer.max_minutes": 1.0}, steps=400)
    assert notes(tmp_path) == ["the jobs ran 60 to 400 steps"]
    for steps in (50, 100):  # which end before the minutes
        config = {"trainer.max_minutes": 60.0, "trainer.max_steps": steps}
        fake_run(tmp_path / "limited" / f"{steps}", config, steps=steps)
    assert notes(tmp_path / "limited") == ["the jobs ran 50 to 100 steps"]


def test_a_job_without_a_result_says_nothing(tmp_path):
    fake_run(tmp_path / "a")
    fake_run(tmp_path / "b", {"data.path": "b.txt"}, None, None)
    (fake_run(tmp_path / "c") / "config.yaml").unlink()
    assert notes(tmp_path) == []


def test_one_run_is_the_best_of_nothing(tmp_path):
    run = fake_run(tmp_path / "sweep" / "a", {"run.name": "a"}, overrides=["run.name=a"])
    lines = report([run], tmp_path / "page.html").splitlines()
    assert lines[1].split()[0] == "2.0000"
    assert lines[2:] == ["python -m mingpt_ddp run.name=a", f"the page is {tmp_path / 'page.html'}"]
    assert "best" in report([tmp_path / "sweep"], tmp_path / "page.html"), "of a sweep of one job"
