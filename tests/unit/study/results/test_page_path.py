"""The path of a report's page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_runs import fake_run
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.study.results.report import MAX_NAME, page_path


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


def test_several_directories_keep_their_own_pages(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        fake_run(tmp_path / "outputs" / name, {"optimizer.lr": ord(name)})
        code, out, _ = call(f"outputs/{name}")
        assert (code, out.splitlines()[-1]) == (0, f"the page is outputs/{name}/report.html")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, _ = call("outputs/a", "outputs/b", "outputs/a/")
    page = Path(out.splitlines()[-1].removeprefix("the page is "))
    assert (code, str(page)) == (0, "outputs/report-a+b.html")
    assert {path: path.read_bytes() for path in before} == before, "each keeps its own page"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} - before.keys() == {
        page.resolve()
    }
    assert "<h2>Jobs</h2>" in page.read_text()
    call("outputs/a", "outputs/a/")
    assert "<h2>Jobs</h2>" not in Path("outputs/a/report.html").read_text(), "named twice"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x/a", "y/a"], "report-x_a+y_a.html"),
        (["sweep", "sweep/lr=1,n=2"], "sweep/report-sweep+lr=1,n=2.html"),
        (["a b<c>", "ü"], "report-a_b_c_+_.html"),
    ],
    ids=str,
)
def test_the_name_of_the_page(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    assert page_path([tmp_path / name for name in names]) == tmp_path / expected


def test_many_names_are_cut(tmp_path):
    names = [page_path([tmp_path / f"job{i}" for i in range(last)]).name for last in (100, 101)]
    assert names[0] != names[1]
    assert all(len(name) < MAX_NAME + 30 for name in names)


def test_the_page_is_in_the_working_directory_if_the_other_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert page_path([tmp_path / "a", tmp_path / "b"]) == Path("report-a+b.html")
