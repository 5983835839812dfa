"""The page of a single run, without a browser."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runs import CONFIG, fake_run

from mingpt_ddp.metrics.trackers.tensorboard import TensorBoardLogger
from mingpt_ddp.results.report import report

HOSTILE = "<script>stolen = 1</script>"
LOG = """2026-01-01 00:00:00,000 INFO run outputs/a
2026-01-01 00:00:01,000 WARNING the warm-up <b>takes long
2026-01-01 00:00:02,000 INFO resuming from the snapshot of step 40 of 100
2026-01-01 00:00:03,000 INFO changed from step 41 on, with 60 steps left:
key                before  now
trainer.max_steps  40      100
2026-01-01 00:00:03,000 INFO the code differs from the snapshot's, 1a2b3c4d5e6f: model/mine.py
2026-01-01 00:00:04,000 INFO step 50/100: loss 2.0
"""


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two ranks that was killed once after step 40."""
    run = fake_run(tmp_path / "a", {"model.name": HOSTILE})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = '{"start": 1767225600.0, "step": 40, "world_size": 2}\n'
    at = next(i for i, line in enumerate(lines) if '"step": 45' in line)
    (run / "metrics.jsonl").write_text("".join([*lines[:at], again, *lines[at:]]))
    for rank in range(2):
        logger = TensorBoardLogger(run / "tensorboard" / f"rank{rank}")
        logger.start(0, 2)
        for step in range(10, 101, 10):
            logger.log(
                step, {"speed/step_ms": 100.0 + 50 * rank, "speed/data_ms": 1.0, "train/loss": 2.0}
            )
        if rank == 0:
            logger.log_text(50, "sample", "an early text\n  indented")
            logger.log_text(100, "sample", f"the last text {HOSTILE}")
        logger.close()
    (run / "main.rank0.log").write_text(LOG)
    code = {"files": {}, "package": {"sha256": "3f" * 32}}
    code |= {"commits": {HOSTILE: "0f" * 20 + "-dirty"}}
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "code": code}))
    return run


def read_page(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the figures, and the text of the body by section."""
    page = path.read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    body = re.search(r"<body>(.*?)<script type", page, re.DOTALL)[1]
    assert HOSTILE not in body and "<b>" not in body
    assert body.count('class="plot"') == len(figures)
    return figures, unescape(re.sub(r"<[^>]+>", " ", body))


def titles(figures: list[dict[str, Any]]) -> list[str]:
    return [figure["layout"]["title"]["text"] for figure in figures]


def test_everything_of_a_run_is_on_its_page(run):
    text = report([run], run / "report.html")
    assert text.splitlines()[-1] == f"the page is {run / 'report.html'}"
    figures, body = read_page(run / "report.html")
    assert titles(figures) == [
        "loss",
        "learning rate",
        "gradient norm",
        "tokens per second",
        "step, ms",
        "fetching the batch, ms",
    ]
    assert [len(trace["x"]) for trace in figures[0]["data"]] == [20, 5], (
        "training and validation loss"
    )
    for figure in figures:
        assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [40], "the restart"
    assert [trace["y"][0] for trace in figures[4]["data"]] == [100.0, 150.0], "a line for each rank"
    assert "1 job: 1 complete, 0:01:02 of training. Faults survived: 1." in body
    assert re.search(r"2 +2026-01-01 .{8} +40 +2 ", body), "the second attempt"
    assert "the last text <script>" in body and "an early text\n  indented" in body
    assert body.index("the last text") < body.index("an early text")
    assert re.search(r"rank0 +100\.00 +1\.00 +rank1 +150\.00 +1\.00", body), "medians by rank"
    assert (
        "trainer.max_steps  40      100" in body
        and "resuming from" in body
        and "WARNING the warm-up" in body
        and "the code differs from" in body
    )
    assert "INFO run" not in body and "INFO step" not in body
    assert f"name: {HOSTILE}" in body and "lr: 0.001" in body
    assert re.search("validation loss +2 ", body) and "Notes" not in body
    assert f"code mingpt_ddp at 3f3f3f3f3f3f, {HOSTILE} at 0f0f0f0f0f0f-dirty" in body


@pytest.mark.parametrize("damage", ["missing", "damaged", "directory"])
@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "result.json", "config.yaml", "main.rank0.log", "tensorboard/rank1"]
)
def test_the_rest_is_shown_without_a_file(file, damage, run):
    path = next((run / file).glob("*")) if file.startswith("tensorboard") else run / file
    path.unlink()
    if damage == "damaged":
        path.write_bytes(b"\xff\n" * 20)
    elif damage == "directory":
        path.mkdir()
    report([run], run / "report.html")
    figures, body = read_page(run / "report.html")
    for name, part in {
        "metrics.jsonl": "tokens per second",
        "result.json": "wall seconds",
        "config.yaml": "lr: 0.001",
        "main.rank0.log": "resuming from",
        "tensorboard/rank1": "the last text",
    }.items():
        shown = part in body or part in titles(figures)
        assert shown == (name != file or file.startswith("tensorboard")), name
    has_rank1 = damage != "directory" or file != "tensorboard/rank1"
    assert len(figures) == (0 if file == "metrics.jsonl" else 4) + 2 * has_rank1
    if damage == "directory" and file == "tensorboard/rank1":
        assert "the timings of rank1 cannot be read" in body


def test_one_of_several_runs_has_no_page_of_its_own(run):
    fake_run(run.parent / "b")
    report([run, run.parent / "b"], run / "report.html")
    assert "Jobs" in read_page_of_sweep(run / "report.html")
    report([run.parent], run / "report.html")
    assert "Jobs" in read_page_of_sweep(run / "report.html")


def read_page_of_sweep(path: Path) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", path.read_text())


def test_a_run_without_anything(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    report([tmp_path / "a"], tmp_path / "page.html")
    figures, body = read_page(tmp_path / "page.html")
    assert figures == [] and "Fixed settings" in body


def test_names_of_curves_are_escaped_and_limited(tmp_path):
    run = fake_run(tmp_path / "a")
    row = {"step": 200, **{f"<img src=x>{number}": 1.0 for number in range(50)}}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    report([run], run / "report.html")
    figures, _ = read_page(run / "report.html")
    assert len(figures) == 1 + 16
    assert titles(figures)[-1].startswith("&lt;img src=x&gt;")
