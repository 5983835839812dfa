"""`report watch=true` writes the page again and again while jobs run."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_runs import fake_run
from launching import PATIENCE_S, ROOT, wait_for
from tools import call_tool

from mingpt_ddp.cli.commands import report as tool
from mingpt_ddp.study.results import report

RELOADS = "this page reloads itself"


@pytest.fixture
def call(monkeypatch, capsys):
    return call_tool(tool, monkeypatch, capsys)


def identity(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


@pytest.mark.parametrize("locked", ["a job", "a sweep without a job"])
def test_the_page_is_written_until_no_job_runs(tmp_path, monkeypatch, capsys, locked):
    monkeypatch.setattr(report, "WATCH_S", 0.05)
    is_job = locked == "a job"
    run = fake_run(tmp_path / "b", status=None, steps=40) if is_job else tmp_path
    page = tmp_path / "report.html"
    texts = []
    watcher = threading.Thread(target=lambda: texts.append(report.watch([tmp_path], page)))
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watcher.start()
        wait_for(lambda: "follows the jobs" in capsys.readouterr().out)
        assert page.exists() == is_job
        fake_run(tmp_path / "a")
        wait_for(page.exists)
        first = identity(page)
        assert RELOADS in page.read_text()
        fake_run(tmp_path / "c")
        wait_for(lambda: identity(page) != first and ">c" in page.read_text())
        assert watcher.is_alive()
    watcher.join(PATIENCE_S)
    assert not watcher.is_alive()
    assert RELOADS not in page.read_text(), "it stays as it is"
    assert texts[0].splitlines()[-1] == f"the page is {page}" and "c" in texts[0]
    assert not [*tmp_path.glob(".*.partial")]


def test_watching_waits_for_a_directory_and_refuses_a_file(tmp_path, monkeypatch, capsys, call):
    monkeypatch.setattr(report, "WATCH_S", 0.05)
    sweep = tmp_path / "sweep"
    page = sweep / "report.html"
    texts = []
    watcher = threading.Thread(target=lambda: texts.append(report.watch([sweep], page)))
    watcher.start()
    wait_for(lambda: f"; it waits for the first run in {sweep}\n" in capsys.readouterr().out)
    fake_run(sweep / "a")
    watcher.join(PATIENCE_S)
    assert texts[0].splitlines()[-1] == f"the page is {page}"
    code, _, error = call(page, "watch")
    assert code == 2 and "report.html is not a directory" in error


def test_ctrl_c_ends_watching_with_the_table(tmp_path):
    run = fake_run(tmp_path / "a", status=None)
    page = run / "report.html"
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "mingpt_ddp", "report", str(run), "watch"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert (
            process.stdout.readline()
            == f"the page {page} follows the jobs until they end, or until Ctrl-C\n"
        )
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "running" in out and out.splitlines()[-1] == f"the page is {page}"
    assert RELOADS not in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["watch"], "watch needs a directory; name a run or the directory of a sweep"),
        (["a", "watch", "compare"], "watch and compare cannot be combined; choose one of them"),
        (["compare"], "compare needs a directory; name a run or the directory of a sweep"),
        (["a", "watch", "format=json"], "watch writes a page; leave out format=json"),
    ],
    ids=str,
)
def test_a_mistake_gives_one_line(tmp_path, monkeypatch, call, words, message):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "a")
    assert call(*words) == (2, "", f"config error: {message}\n")
    assert not (tmp_path / "a" / "report.html").exists()
