"""Compare two versions of a user's code. A SIGKILL in between costs one job at most."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from launching import ROOT, TINY, UnforkedJob, call, wait_for
from runs import read_history, tool

MINE = """
from mingpt_ddp.registry import ScheduleConfig, register

@register("schedule", "mine", ScheduleConfig)
def mine(step, steps, config):
    return {}
"""
USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(project: Path, *words: str) -> None:
    subprocess.run(["git", *USER, *words], cwd=project, check=True, capture_output=True)


def test_a_comparison_killed_between_two_jobs_continues_to_its_verdict(tmp_path):
    """The change is not committed in Git. Its learning rates are too low to train anything."""
    project = tmp_path / "project"
    (project / "recipe").mkdir(parents=True)
    git(project, "init", "-q")
    (project / ".gitignore").write_text("outputs/\noutput-*\n")
    (project / "recipe" / "mine.py").write_text(MINE.format(1.0))
    git(project, "add", ".")
    git(project, "commit", "-qm", "one")
    (project / "recipe" / "mine.py").write_text(MINE.format(1e-6))
    words = [
        *TINY,
        "--config-dir=recipe",
        "optimizer.code=mine.py",
        "optimizer.schedule=mine",
        "optimizer.lr=1e-2",
        "run.seed=1,2",
        "require=not_worse",
    ]
    command = tool("versions", "HEAD", ".", *words)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def results() -> dict[Path, int]:
        found = (project / "outputs").glob("versions-*/*/result.json")
        return {path: path.stat().st_mtime_ns for path in found}

    job = UnforkedJob(command, project, **cache)
    wait_for(lambda: results() or job.process.poll() is not None, what="a job")
    job.process.kill()
    job.process.wait()
    before = results()
    done = call(command, project, separate=True, **cache)
    assert done.returncode == 1, done.stdout + done.stderr
    after = results()
    assert len(after) == 4 and before.items() <= after.items(), "no job is trained twice"
    order = [path.parent.name for path in sorted(after, key=after.__getitem__)]
    assert order == [
        f"{name},run.seed={seed}"
        for seed, name in zip("1122", ["1-HEAD", "2-.", "2-.", "1-HEAD"], strict=True)
    ]
    # The losses and times of the jobs have the format of a report.
    assert re.search(
        r"^job 4 of 4: validation loss \d\.\d{4} after \d:\d\d:\d\d$", done.stderr, re.M
    )
    table, (better, speed, bits, where, unmet) = (
        done.stdout.splitlines()[:3],
        done.stdout.splitlines()[-5:],
    )
    assert table[0] == "compared by validation loss, in nats per token"
    assert better.startswith("HEAD is better than . by ") and "2 and 2 seeds" in better
    assert speed.startswith(". against HEAD, speed: a step is ")
    assert bits == ". against HEAD: different bits, first seen at step 2 with seed 1, 2"
    (verdict,) = (project / "outputs" / "experiments.jsonl").read_text().splitlines()
    record = json.loads(verdict)
    runs_are_in = f"outputs/{next(iter(after)).parents[1].name}"
    assert record["runs"] == [runs_are_in] and record["overrides"] == words[:-2]
    assert record["versions"]["."].endswith("-dirty, code.patch")
    codes = [code for setting in record["settings"] for code in setting["codes"]]
    for code, text in zip(codes, record["versions"].values(), strict=True):
        assert f"recipe/mine.py ({code})" in text, "one code of each"
    assert record["comparisons"][0]["sentence"] == "; ".join([better, speed, bits])
    runs = [path.parent for path in after]
    assert {read_history(run).starts for run in runs} <= {1, 2}
    first, second = (
        json.loads((run / "result.json").read_text())["code"] for run in sorted(runs)[::2]
    )
    assert first["files"] != second["files"]
    assert where == f"the runs are in {runs_are_in}"
    assert unmet == "require=not_worse is not met: worse by more than chance, or not comparable: ."
