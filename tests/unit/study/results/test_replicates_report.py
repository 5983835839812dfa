"""The report of a sweep over seeds has a row for each recipe, in the table and in JSON."""

from __future__ import annotations

import json
import math
import re

import pytest
from fake_runs import fake_run
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.study.results.report import report

# half the width of the 95% interval of two values that differ by 0.2
HALF_WIDTH = math.tan(0.475 * math.pi) / 10


@pytest.fixture
def sweep(tmp_path):
    """Write two recipes with two seeds each.

    One has losses of 2.0 and 2.2. The other has 1.9 and 2.5, with the best single job.
    """
    for lr, losses in ((0.1, (2.0, 2.2)), (0.2, (1.9, 2.5))):
        for seed, loss in enumerate(losses, start=1):
            name = f"optimizer.lr={lr},run.seed={seed}-{seed:08x}"
            values = {"optimizer.lr": lr, "run.seed": seed}
            fake_run(tmp_path / "sweep" / name, values, val_loss=loss, faults=seed)
    return tmp_path / "sweep"


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_a_row_for_each_recipe(sweep, tmp_path):
    lines = report([sweep], tmp_path / "page.html").splitlines()
    titles = ["val loss", "± 95%", "sd", "n", "status", "lr", "step", "tokens/s", "faults"]
    assert cells(lines[0]) == [*titles, "total time", "job"]
    numbers = ["*", "2.1000", f"{HALF_WIDTH:.4f}", f"{math.sqrt(0.02):.4f}", "2", "complete", "0.1"]
    more = ["100", "40,000", "3", "0:02:03", "optimizer.lr=0.1,run.seed=*-*"]
    assert cells(lines[1]) == [*numbers, *more] and cells(lines[2])[0] == "2.2000"
    best = next(line for line in lines if line.startswith("best: "))
    assert best.startswith(
        f"best: 2.1000 ± {HALF_WIDTH:.4f}, mean of 2 seeds; its best seed is {sweep}"
    )
    advice = f"{sweep} compare` tests whether other settings differ from it"
    assert lines[lines.index(best) + 1].endswith(advice)
    fake_run(sweep / "third", {"optimizer.lr": 0.1, "run.seed": 3}, "preempted", 9.0)
    row = cells(report([sweep], tmp_path / "page.html").splitlines()[1])
    assert row[1] == "2.1000" and row[4:6] == ["2/3", "complete, preempted"]


def test_replicates_on_other_ranks_are_noted(tmp_path):
    for seed in (1, 2):
        keys = {"run.seed": seed, "ddp.nproc_per_node": seed, "trainer.eval_every": seed}
        run = fake_run(tmp_path / f"{seed}", keys)
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "world_size": seed}))
    text = report([tmp_path], tmp_path / "page.html")
    assert "note: replicates differ in trainer.eval_every: no loss depends on this" in text
    assert "note: replicates differ in ddp.nproc_per_node: the last bits" in text
    assert "note: replicates ran on different numbers of ranks" in text


def test_long_directories_do_not_break_the_table(tmp_path):
    for number in range(2):
        name = f"optimizer.lr=0.000{number}2345678901234567,optimizer.weight_decay=0.0123456789012"
        fake_run(tmp_path / f"{name}-0123456{number}", {"optimizer.lr": 1 + number})
    rows = report([tmp_path], tmp_path / "page.html").splitlines()[1:3]
    assert all(len(row) < 130 for row in rows)
    assert {row[-9:] for row in rows} == {"-01234560", "-01234561"}, "the digest stays"


def test_the_json_document(sweep, monkeypatch, capsys):
    run = sweep / "optimizer.lr=0.1,run.seed=1-00000001"
    result = json.loads((run / "result.json").read_text())
    numbers = {"bad": math.nan, "giant": 10**400, "is_x": True, "text": "x", "tokens": 7}
    (run / "result.json").write_text(json.dumps({**result, **numbers}))
    fake_run(sweep / "a\x1b[2J", {"optimizer.lr": 0.3}, status=None, val_loss=None)
    code, out, error = call_tool(tool, monkeypatch, capsys)(sweep, "format=json")
    assert (code, error) == (0, "") and "\x1b" not in out
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["parameters"] == ["optimizer.lr"] and document["objective"] == "val_loss"
    best, other, nothing = document["groups"]
    assert best["parameters"] == {"optimizer.lr": 0.1}
    assert (best["n"], best["mean"]) == (2, pytest.approx(2.1))
    assert (best["low"], best["high"]) == pytest.approx((2.1 - HALF_WIDTH, 2.1 + HALF_WIDTH))
    first = best["jobs"][0]
    assert (first["seed"], first["status"]) == (1, "complete")
    expected = {"step": 100, "val_loss": 2.0, "wall_seconds": 61.5}
    assert first["result"] == {**expected, "bad": None, "giant": None, "tokens": 7}
    assert [job["seed"] for job in other["jobs"]] == [1, 2]
    assert (nothing["n"], nothing["mean"], nothing["low"]) == (0, None, None)
    assert not (sweep / "report.html").exists()
