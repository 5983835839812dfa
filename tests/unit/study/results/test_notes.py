"""The number by which a report ranks jobs, and its notes on jobs that cannot be compared."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_run

from mingpt_ddp.study.results.analysis.verdict import verdict
from mingpt_ddp.study.results.report import report

RANKED = "ranked by bits per byte: losses per token of different tokenizers cannot be compared"
TASKS = "the jobs have different tasks, each of which defines its own loss (task.name)"


def notes(directory: Path) -> list[str]:
    """Return the notes of the table. The page has the same notes."""
    lines = report([directory], directory / "page.html").splitlines()
    found = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    page = unescape((directory / "page.html").read_text())
    section = re.search("<h2>Comparison</h2><ul><li>(.*?)</li></ul>", page)
    items = section[1].split("</li><li>") if section else []
    verdict = [item for item in items if item.startswith("nothing can be said")]
    assert items == found + verdict
    return found


# Different tokenizers


@pytest.fixture
def tokenizers(tmp_path) -> Path:
    """Write three runs with different tokenizers and a pruned run.

    Of the three, char has the lowest loss, BPE the fewest bits per byte, and byte has none.
    """
    for name, loss, bits in (("char", 3.3, 4.75), ("bpe", 7.04, 3.5), ("byte", 2.0, None)):
        keys = {"data.tokenizer": name, "data.vocab_size": None}
        fake_run(tmp_path / "sweep" / name, keys, val_loss=loss, bits_per_byte=bits)
    pruned = {"data.tokenizer": "bpe", "data.vocab_size": 300}
    fake_run(tmp_path / "sweep" / "pruned", pruned, "pruned", val_loss=1.0, bits_per_byte=1.0)
    return tmp_path / "sweep"


def test_different_tokenizers_are_ranked_by_bits_per_byte(tokenizers):
    lines = report([tokenizers], tokenizers / "page.html").splitlines()
    head = "bits_per_byte status tokenizer vocab_size step tokens/s faults time val loss job"
    assert [" ".join(line.split()) for line in lines[:5]] == [
        head,
        "* 3.5000 complete bpe null 100 40,000 0 0:01:02 7.0400 bpe",
        "4.7500 complete char null 100 40,000 0 0:01:02 3.3000 char",
        "(1.0000) pruned bpe 300 100 40,000 0 0:01:02 1.0000 pruned",
        "- complete byte null 100 40,000 0 0:01:02 2.0000 byte",
    ]
    unranked = "note: these jobs have no bits per byte and are not ranked: byte"
    assert lines[5:8] == [f"note: {RANKED}", unranked, f"best: {tokenizers / 'bpe'}"]
    page = (tokenizers / "page.html").read_text()
    assert "Bits per byte 3.5000, validation loss 7.0400, tokenizer: bpe, vocab size: null." in page
    for title in ("bits per byte", "validation loss"):
        assert f"<th><button>{title}</button></th>" in page
    assert "Blue to orange: values from 3.500 to 4.750." in page
    figures: list[dict[str, Any]] = json.loads(
        re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1]
    )
    curves, training, *against = figures
    assert curves["layout"]["title"]["text"] == "bits per byte"
    lasts = [trace["y"][-1] for trace in curves["data"]]
    assert lasts == [1.0, 4.75, 3.5], "of every job that has measured it"
    assert "per token" in training["layout"]["title"]["text"]
    assert {each["layout"]["yaxis"]["title"]["text"] for each in against} == {"bits per byte"}


def test_no_job_with_bits_per_byte(tmp_path):
    for name in ("char", "byte"):
        fake_run(tmp_path / name, {"data.tokenizer": name})
    text = report([tmp_path], tmp_path / "page.html")
    assert (
        "these jobs have no bits per byte and are not ranked: byte, char\nno complete job has bits"
        in text
    )
    assert "<p>No complete job has bits per byte.</p>" in (tmp_path / "page.html").read_text()


# Results that cannot be compared

TEXTS = "the jobs were measured on different texts ({}): their results cannot be compared"
PARTS = (
    "the jobs were measured on different parts of the validation split ({}): their results "
    "cannot be compared exactly"
)
SHA = {"data.sha256": "1"}
TEN = {"trainer.eval_steps": 10}
DIGITS = {"data.dataset": "digits", "data.path": "elsewhere", "task.name": "classification"}
DATA = "the jobs were measured on different data (data.dataset): their results cannot be compared"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {"data.path": "b.txt"}, [TEXTS.format("data.path")]),
        ({}, {"data.truncate": 0.5}, [TEXTS.format("data.truncate")]),
        (
            {},
            {"data.train_split": 0.5, "data.test_split": 0.1},
            [TEXTS.format("data.train_split, data.test_split")],
        ),
        ({}, {"data.sources": [["a.txt", 1.0]]}, [TEXTS.format("data.sources")]),
        (
            SHA,
            {"data.path": "b.txt", "data.sha256": "2"},
            [TEXTS.format("data.path, data.sha256")],
        ),
        ({}, {"optimizer.lr": 2}, []),
        # Keys that are not recorded have these defaults.
        ({}, {"data.truncate": 1.0, "data.train_split": 0.9, "data.sources": None}, []),
        (SHA, {**SHA, "data.path": "a/copy.txt"}, []),
        (SHA, {"data.sha256": None}, []),
        ({}, {"data.cache_dir": "elsewhere", "data.name": "a label"}, []),
        ({}, DIGITS, [DATA, TASKS]),
        ({}, {"task.name": "zloss"}, [TASKS]),  # there is no note on different texts
        ({}, {"task.name": "language_model"}, []),
        (TEN, {"trainer.eval_steps": 5}, [PARTS.format("trainer.eval_steps")]),
        (TEN, {}, [PARTS.format("trainer.eval_steps")]),
        (
            TEN,
            {**TEN, "trainer.batch_size": 24},
            [PARTS.format("trainer.eval_steps, trainer.batch_size")],
        ),
        (
            TEN,
            {**TEN, "data.block_size": 32},
            [PARTS.format("trainer.eval_steps, data.block_size")],
        ),
        (TEN, {"trainer.eval_steps": 5, "trainer.batch_size": 24}, []),  # the same windows
        (
            {**TEN, "data.tokenizer": "char"},
            {**TEN, "data.tokenizer": "byte"},
            [RANKED, PARTS.format("trainer.eval_steps, data.tokenizer")],
        ),
    ],
    ids=str,
)
def test_notes_on_two_jobs(tmp_path, one, other, expected):
    fake_run(tmp_path / "a", one, bits_per_byte=2.0)
    fake_run(tmp_path / "b", other, bits_per_byte=2.0)
    fake_run(tmp_path / "nothing", {"data.path": "c.txt"}, None, None)  # has no result
    (fake_run(tmp_path / "unknown", bits_per_byte=2.0) / "config.yaml").unlink()
    assert notes(tmp_path) == expected


MINUTES = {"trainer.max_minutes": 0.5, "trainer.max_steps": None, "trainer.max_epochs": None}
UNEQUAL = (
    "the comparison is not at equal time: settings with trainer.max_minutes=0.5 trained for 0.353 "
    "to 0.5 minutes. The pace of the machine changed, or another limit ended some jobs"
)


def test_different_steps_of_complete_jobs(tmp_path):
    fake_run(tmp_path / "60", {"trainer.max_steps": 60}, steps=60)
    fake_run(tmp_path / "200", {"trainer.max_steps": 200}, steps=200)
    fake_run(tmp_path / "pruned", {"optimizer.lr": 2}, "pruned", steps=20)
    assert notes(tmp_path) == ["the jobs ran 60 to 200 steps"]


@pytest.mark.parametrize(
    ("one", "other", "limit", "expected"),
    [
        (0.49, 0.51, 0.5, []),
        (0.353, 0.5, 0.5, [UNEQUAL]),
        (0.5, 1.0, 1.0, []),  # the limits differ
        (None, 0.5, 0.5, []),
    ],
)
def test_minutes_that_settings_took(tmp_path, one, other, limit, expected):
    """The report, its page and a comparison all show them."""
    for seed in (1, 2, 3):
        values = MINUTES | {"run.seed": seed}
        fake_run(tmp_path / f"a{seed}", values, minutes=one, val_loss=2 + seed / 100)
        values |= {"optimizer.lr": 2e-3, "trainer.max_minutes": limit}
        fake_run(tmp_path / f"b{seed}", values, minutes=other, val_loss=3 + seed / 90)
    text = report([tmp_path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    compared = verdict([tmp_path], as_json=False)
    for said in (text, page, compared):
        assert ("not at equal time" in said) == bool(expected)
        assert "count as equal" not in said
        assert "minutes" in said
        assert f"{other:.3g}" in said
    lines = [line for line in text.splitlines() if line.startswith("note: ")]
    assert lines == [f"note: {note}" for note in expected]


def test_a_single_run_is_not_called_the_best(tmp_path):
    run = fake_run(tmp_path / "sweep" / "a", {"run.name": "a"}, overrides=["run.name=a"])
    lines = report([run], tmp_path / "page.html").splitlines()
    assert lines[1].split()[0] == "2.0000"
    again = f"python -m mingpt_ddp again {run}"
    assert lines[2:] == [again, f"the page is {tmp_path / 'page.html'}"]
    assert "best" in report([tmp_path / "sweep"], tmp_path / "page.html"), "of a sweep of one job"
