"""The report of a sweep over seeds: table, page and JSON have a row for each recipe."""

from __future__ import annotations

import json
import math
import re

import pytest
from fake_runs import fake_run
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.results.analysis.importance import LEAST_GROUPS, importances
from mingpt_ddp.results.groups import replicates
from mingpt_ddp.results.page.figures import mean_curve
from mingpt_ddp.results.report import report
from mingpt_ddp.results.runs import read_jobs

HALF = math.tan(0.475 * math.pi) / 10  # of the interval of two values that differ by 0.2


@pytest.fixture
def sweep(tmp_path):
    """Two recipes of two seeds: 2.0 and 2.2, and 1.9 and 2.5, which has the best single job."""
    number = 0
    for lr, losses in ((0.1, (2.0, 2.2)), (0.2, (1.9, 2.5))):
        for seed, loss in enumerate(losses, start=1):
            number += 1
            values = {"optimizer.lr": lr, "run.seed": seed}
            fake_run(
                tmp_path / "sweep" / f"optimizer.lr={lr},run.seed={seed}-{number:08x}",
                values,
                val_loss=loss,
                faults=seed,
            )
    return tmp_path / "sweep"


def figures_of(path):
    found = re.search(r'id="figures">(.*?)</script>', path.read_text())
    return json.loads(found[1])


def cells(line):
    return re.split(r"\s{2,}", line.strip())


# The table


def test_a_row_for_each_recipe(sweep, tmp_path):
    lines = report([sweep], tmp_path / "page.html").splitlines()
    titles = ["val loss", "± 95%", "sd", "n", "status", "lr", "step", "tokens/s", "faults"]
    assert cells(lines[0]) == [*titles, "total time", "job"]
    sd = math.sqrt(0.02)
    assert cells(lines[1]) == [
        *("*", "2.1000", f"{HALF:.4f}", f"{sd:.4f}", "2", "complete", "0.1", "100", "40,000"),
        *("3", "0:02:03", "optimizer.lr=0.1,run.seed=*-*"),
    ]
    assert cells(lines[2])[0] == "2.2000"
    best = next(line for line in lines if line.startswith("best: "))
    assert best.startswith(f"best: 2.1000 ± {HALF:.4f}, mean of 2 seeds; its best seed is {sweep}")
    advice = f"{sweep} compare` tests whether others differ from it"
    assert lines[lines.index(best) + 1].endswith(advice)


def test_a_row_says_how_many_seeds_are_complete(sweep, tmp_path):
    fake_run(sweep / "third", {"optimizer.lr": 0.1, "run.seed": 3}, "preempted", 9.0)
    row = cells(report([sweep], tmp_path / "page.html").splitlines()[1])
    assert row[1] == "2.1000" and row[4:6] == ["2/3", "complete, preempted"]


def test_replicates_on_other_ranks_are_noted(tmp_path):
    for seed in (1, 2):
        run = fake_run(tmp_path / f"{seed}", {"run.seed": seed, "ddp.nproc_per_node": seed})
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "world_size": seed}))
    text = report([tmp_path], tmp_path / "page.html")
    assert "note: replicates differ in ddp.nproc_per_node: the last bits" in text
    assert "note: replicates ran on different numbers of ranks" in text


def test_long_directories_do_not_break_the_table(tmp_path):
    for number in range(2):
        values = (
            f"optimizer.lr=0.000{number}2345678901234567,optimizer.weight_decay=0.01234567890123"
        )
        fake_run(tmp_path / f"{values}-0123456{number}", {"optimizer.lr": 1 + number})
    rows = report([tmp_path], tmp_path / "page.html").splitlines()[1:3]
    assert all(len(row) < 130 for row in rows)
    assert {row[-9:] for row in rows} == {"-01234560", "-01234561"}, "the digest stays"


# The page


def test_a_band_and_a_line_for_each_recipe(sweep, tmp_path):
    report([sweep], tmp_path / "page.html")
    curves, training, against = figures_of(tmp_path / "page.html")
    for figure in (curves, training):
        assert [trace["mode"] for trace in figure["data"]] == ["none", "lines", "none", "lines"]
    band, line = curves["data"][2:]  # the best is drawn last
    assert line["y"][-1] == pytest.approx(2.1) and line["x"] == [20, 40, 60, 80, 100]
    assert band["y"][4] == pytest.approx(2.1 + HALF), "above, at the last step"
    assert band["y"][5] == pytest.approx(2.1 - HALF), "and back below"
    assert band["fill"] == "toself"
    assert "2 seeds" in line["text"] and "±" in line["text"]
    (points,) = against["data"]
    assert points["y"] == pytest.approx([2.2, 2.1])
    assert points["error_y"]["array"] == pytest.approx([3 * HALF, HALF])
    low, high = against["layout"]["yaxis"]["range"]
    assert low < 2.2 - math.sqrt(0.18) and high > 2.2 + math.sqrt(0.18), "a deviation to both sides"
    text = (tmp_path / "page.html").read_text()
    assert "<h2>Groups</h2>" in text and "<h2>Jobs</h2>" in text
    assert text.count("<tr><td>") == 2 + 4
    assert "4 jobs in 2 groups" in text and "learning rate: 0.1" in text


def test_a_curve_has_the_steps_that_all_seeds_have(tmp_path):
    for seed, steps in ((1, 100), (2, 60)):
        status = None if steps < 100 else "preempted"
        fake_run(tmp_path / f"{seed}", {"run.seed": seed}, status, steps=steps)
    (group,) = replicates(read_jobs([tmp_path]))
    assert [*mean_curve(job.history.series("val_loss") for job in group.jobs)] == [20, 40, 60]


def test_hostile_parameters_are_escaped_in_the_legend(tmp_path):
    for number in range(4):
        values = {"model.name": f"<img src=x>{number % 2}", "run.seed": number // 2}
        fake_run(tmp_path / f"{number}", values)
    report([tmp_path], tmp_path / "page.html")
    assert "<img" not in (tmp_path / "page.html").read_text().partition("<script")[0]


# The importance of parameters


def test_the_importance_of_parameters(tmp_path, capsys):
    pytest.importorskip("optuna", "4.7")
    for number in range(16):
        values = {"optimizer.lr": 10.0 ** -(number % 4), "model.name": "ab"[number // 4 % 2]}
        values["model.n_layer"] = number // 8
        fake_run(tmp_path / f"{number}", values, val_loss=2.0 + number % 4)
    text = report([tmp_path], tmp_path / "page.html")
    line = next(line for line in text.splitlines() if line.startswith("importance"))
    assert line.startswith("importance (PED-ANOVA): lr ")
    _, _, first, second, third, parallel, *_ = figures_of(tmp_path / "page.html")
    titles = [each["layout"]["xaxis"]["title"]["text"] for each in (first, second, third)]
    assert titles[0].startswith("learning rate, importance 0."), "the most important comes first"
    assert all(", importance " in title for title in titles)
    assert parallel["layout"]["xaxis"]["ticktext"][0] == "learning rate"
    assert capsys.readouterr() == ("", "")


def test_few_groups_have_no_importance(tmp_path):
    for number in range(LEAST_GROUPS - 1):
        fake_run(tmp_path / f"{number}", {"optimizer.lr": number, "model.n_layer": number % 2})
    groups = replicates(read_jobs([tmp_path]))
    assert importances(groups, ["optimizer.lr", "model.n_layer"]) == {}


# JSON


def test_the_json_document(sweep, monkeypatch, capsys):
    run = sweep / "optimizer.lr=0.1,run.seed=1-00000001"
    result = json.loads((run / "result.json").read_text())
    numbers = {"bad": math.nan, "giant": 10**400, "is_x": True, "text": "x", "tokens": 7}
    (run / "result.json").write_text(json.dumps({**result, **numbers}))
    code, out, error = call_tool(tool, monkeypatch, capsys)(sweep, "format=json")
    assert (code, error) == (0, "")
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["parameters"] == ["optimizer.lr"] and document["objective"] == "val_loss"
    best, other = document["groups"]
    assert best["parameters"] == {"optimizer.lr": 0.1}
    assert (best["n"], best["mean"]) == (2, pytest.approx(2.1))
    assert (best["low"], best["high"]) == pytest.approx((2.1 - HALF, 2.1 + HALF))
    first = best["jobs"][0]
    assert (first["seed"], first["status"]) == (1, "complete")
    expected = {"step": 100, "val_loss": 2.0, "wall_seconds": 61.5}
    assert first["result"] == {**expected, "bad": None, "giant": None, "tokens": 7}
    assert [job["seed"] for job in other["jobs"]] == [1, 2]
    assert not (sweep / "report.html").exists()


def test_the_json_of_nothing_complete(tmp_path, monkeypatch, capsys):
    fake_run(tmp_path / "a\x1b[2J", status=None, val_loss=None)
    code, out, _ = call_tool(tool, monkeypatch, capsys)(tmp_path, "format=json")
    (group,) = json.loads(out)["groups"]
    assert (code, group["n"], group["mean"], group["low"]) == (0, 0, None, None)
    assert "\x1b" not in out
