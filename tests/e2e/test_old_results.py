"""Edit the text or a user's code between two starts. Old results must not pass for new ones."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest
from launching import TINY, call, python_main
from runs import tool

MINE = """
import rate_of_mine
from mingpt_ddp.registry import ScheduleConfig, register

@register("schedule", "mine", ScheduleConfig)
def mine(step, steps, config):
    return rate_of_mine.RATE
"""
WORDS = [
    *TINY,
    "trainer.max_steps=2",
    "data.path=text.txt",
    "data.truncate=1.0",
    "--config-dir=recipe",
    "optimizer.code=mine.py",
    "optimizer.schedule=mine",
]
FILE = "recipe/rate_of_mine.py"


@pytest.fixture
def project(tmp_path) -> Path:
    """Make a working directory with a text, a schedule, and a file that the schedule imports."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.py").write_text(MINE)
    (tmp_path / FILE).write_text("RATE = 1.0\n")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    return tmp_path


def train(cwd: Path, *words: str) -> tuple[int, str]:
    done = call([*python_main(), *WORDS, *words], cwd)
    return done.returncode, done.stdout


def test_a_sweep_reports_that_its_results_come_from_old_code(project):
    sweep = ("-m", "run.name=lr", "optimizer.lr=0.01,0.02")
    code, text = train(project, *sweep, "run.seed=1,2")
    assert code == 0 and "has changed" not in text and "old code" not in text, text
    results = sorted(project.glob("outputs/lr/*/result.json"))
    for result in results:
        recorded = json.loads(result.read_text())
        assert recorded["code"]["files"].keys() == {"recipe/mine.py", FILE}
        assert len(recorded["data"]["sha256"]) == 64

    (project / FILE).write_text("RATE = 0.1\n")
    code, text = train(project, *sweep, "run.seed=1,2")
    assert code == 0 and text.count("already complete, validation loss") == 4
    assert text.count(f"{FILE} has changed since complete jobs were trained") == 1, text
    assert text.count("complete, old code") == 2, "both settings of the table"
    assert f"note: old code: some results are from before the last change of {FILE}" in text
    again = call(tool("report", "outputs/lr"), project, separate=True)
    assert again.stdout.count("complete, old code") == 2, "right after the edit too"
    assert sorted(project.glob("outputs/lr/*/result.json")) == results

    code, text = train(project, *sweep, "run.seed=1,2,3,4")
    assert code == 0 and "sweep: 8 jobs, 4 already complete, 0 failed" in text
    report = tool("report", "outputs/lr", "compare", "format=json")
    settings = json.loads(call(report, project, separate=True).stdout)["settings"]
    assert [each["n"] for each in settings] == [2, 2, 2, 2]
    assert all(", code=" in each["name"] for each in settings)

    code, text = train(project, *sweep, "run.seed=1,2,3,4", "run.accept_code=true")
    assert code == 0 and text.count("run.accept_code=true: results of complete jobs count") == 1
    assert "old code" not in text and "mean of 4 seeds" in text


def test_a_sweep_refuses_results_of_another_text(project):
    sweep = ("-m", "run.name=lr", "optimizer.lr=0.01,0.02")
    code, text = train(project, *sweep)
    assert code == 0, text
    path = project / "text.txt"
    before = path.read_text()
    path.write_text(before + "whether 'tis nobler\n")
    code, text = train(project, *sweep)
    assert code == 2 and "already complete" not in text
    assert text.splitlines()[-1].startswith(
        "data error: data.path=text.txt is not the text that outputs/lr/optimizer.lr=0.01-"
    )
    assert "run.resume=never or a new run.name" in text
    assert not (project / "outputs" / "lr" / "failures.jsonl").exists()
    assert train(project, *sweep, "run.resume=never")[0] == 0
    path.write_text(before)
    code, text = train(project, *sweep)
    assert code == 0 and "sweep: 2 jobs, 2 already complete, 0 failed" in text


def test_a_search_checks_the_text_and_the_code_too(project):
    pytest.importorskip("optuna")
    search = ("-m", "sweep=optuna", "run.name=s", "sweep.trials=2", "sweep.sampler=random")
    search += ("optimizer.lr=interval(0.01,0.02)",)
    code, text = train(project, *search)
    assert code == 0, text
    (project / FILE).write_text("RATE = 0.1\n")
    code, text = train(project, *search)
    assert code == 0 and "sweep: 2 jobs, 2 already complete, 0 failed" in text
    assert text.count(f"{FILE} has changed since complete jobs were trained") == 1, text
    before = (project / "text.txt").read_text()
    (project / "text.txt").write_text(before * 2)
    code, text = train(project, *search)
    assert code == 2 and "is not the text that outputs/s/" in text.splitlines()[-1]
    (project / "text.txt").write_text(before)
    code, text = train(project, *search)
    assert code == 0 and "sweep: 2 jobs, 2 already complete, 0 failed" in text, "as if nothing was"


def test_a_run_names_the_files_that_have_changed_since_its_snapshot(project):
    for words in ("init -q", "add recipe", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=project, check=True)
    (project / FILE).write_text("RATE = 0.5\n")
    run = project / "outputs" / "run"
    code, text = train(project, "run.name=run")
    assert code == 0 and f"code {FILE}, recipe/mine.py (" not in text
    assert f"code recipe/mine.py, {FILE} (" in text, text
    first = json.loads((run / "result.json").read_text())["code"]
    assert first["earlier"] == [] and first["commits"].popitem()[1].endswith("-dirty")
    patch = run / "code.patch"
    assert "+RATE = 0.5" in patch.read_text() and stat.S_IMODE(patch.stat().st_mode) == 0o600

    (project / FILE).write_text("RATE = 0.1\n")
    code, text = train(project, "run.name=run")
    assert f"it was trained before these files were edited: {FILE}; choose" in text, text
    code, text = train(project, "run.name=run", "trainer.max_steps=4")
    assert code == 0 and f"{FILE}; from step 3 on the run is trained with the current" in text
    second = json.loads((run / "result.json").read_text())["code"]
    assert len(second["earlier"]) == 1 and second["files"][FILE] != first["files"][FILE]
    assert "+RATE = 0.5" in patch.read_text()
    assert "+RATE = 0.1" in (run / second["patch"]).read_text()

    state = json.loads(next(run.glob("snapshots/step_00000004/state.json")).read_text())
    assert state["code"]["files"] == second["files"]
