"""Check `until=decided`: it trains seeds until a difference is decided, and a decision stands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from launching import (
    PATIENCE_S,
    ROOT,
    TINY,
    UnforkedJob,
    call,
    python_main,
    torchrun,
    wait_for,
)
from runs import fail, read_result, succeed, tool

SEEDS = range(1, 11)
SHORT = [*TINY, "trainer.max_steps=6", "trainer.log_every=2", "snapshot.every_steps=6"]
# The second learning rate is far too low to learn anything.
SWEEP = [*SHORT, "run.name=lr", "optimizer.lr=0.01,1e-07", "sweep.until=decided"]
SWEEP.append(f"run.seed={','.join(map(str, SEEDS))}")


def seeds_of(sweep: Path, lr: str) -> list[int]:
    """Return the seeds of the complete jobs with a learning rate."""
    found = []
    for path in sweep.glob(f"optimizer.lr={lr},*/result.json"):
        if read_result(path.parent)["status"] == "complete":
            found.append(int(re.search(r"run\.seed=(\d+)", path.parent.name)[1]))
    return sorted(found)


def decided(sweep: Path) -> dict[str, list[list[float]]]:
    return json.loads((sweep / "sweep.json").read_text())["until_decided"]["decided"]


def compare(where: Path, *words: str) -> str:
    return succeed(tool("report", "outputs/lr", "compare", *words), where)


def test_after_a_kill_no_seed_is_trained_twice_and_the_decision_stands(tmp_path):
    sweep = tmp_path / "outputs" / "lr"
    command = [*python_main(), "-m", *SWEEP]

    def results() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sweep.glob("*/result.json")}

    job = UnforkedJob(command, tmp_path)
    wait_for(lambda: len(results()) > 2 or job.process.poll() is not None, what="three jobs")
    job.process.kill()
    job.process.wait()
    before = results()
    text = succeed(command, tmp_path)
    after = results()
    assert before.items() <= after.items(), "no seed is trained twice"
    n = len(seeds_of(sweep, "1e-07"))
    assert 5 <= n < len(SEEDS) and seeds_of(sweep, "1e-07") == [*SEEDS][:n]
    assert seeds_of(sweep, "0.01") == [*SEEDS][:n]
    assert f"decided after {n} pairs of seeds: optimizer.lr=1e-07 is worse than" in text
    assert f"{20 - 2 * n} not needed" in text
    pairs = decided(sweep)["optimizer.lr=1e-07"]
    assert len(pairs) == n

    said = compare(tmp_path)
    assert "lr=0.01 is better than lr=1e-7 by " in said
    assert f"sequential test after {n} paired seeds" in said and "until=decided" in said
    # The results of the other setting are now better, but the decision stands.
    for path in sweep.glob("optimizer.lr=1e-07,*/result.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps({**result, "val_loss": 0.5}))
    assert "lr=0.01 is better than lr=1e-7 by " in compare(tmp_path)
    (comparison,) = json.loads(compare(tmp_path, "format=json"))["comparisons"]
    assert (comparison["decision"], comparison["test"]) == ("different", "sequential")
    assert comparison["pairs"] == n and comparison["planned_pairs"] == len(SEEDS)

    text = succeed(command, tmp_path)
    assert results().keys() == after.keys() and f"{20 - 2 * n} not needed" in text


@pytest.mark.parametrize("way", ["concurrent", "lock-step"])
def test_other_ways_to_run_the_jobs_reach_the_same_decision(way, tmp_path):
    ways = {
        "concurrent": [*python_main(), "-m", "sweep.parallel=2", "ddp.nproc_per_node=1"],
        "lock-step": [*torchrun(2), "-m"],
    }
    succeed([*ways[way], *SWEEP], tmp_path)
    sweep = tmp_path / "outputs" / "lr"
    n = len(decided(sweep)["optimizer.lr=1e-07"])
    assert 5 <= n < len(SEEDS)
    for lr in ("0.01", "1e-07"):
        trained = seeds_of(sweep, lr)
        assert trained[:n] == [*SEEDS][:n]
        assert len(trained) <= n + (way == "concurrent"), "a job that runs may finish first"


def test_a_diverged_setting_ends_the_sweep(tmp_path):
    diverging = [word.replace("0.01,1e-07", "0.01,1e+30") for word in SWEEP]
    text = fail([*python_main(), "-m", *diverging], tmp_path)
    assert "18 not needed" in text and len(seeds_of(tmp_path / "outputs" / "lr", "1e+30")) == 0
    said = compare(tmp_path)
    assert re.search(r"not decided between .*: seed 1 of .* diverged", said)


def test_bad_rules_are_refused_before_anything_is_written(tmp_path):
    cases = {
        "too few seeds": (["run.seed=1,2,3,4"], "give at least 5 seeds"),
        "one setting": (
            ["optimizer.lr=0.01"],
            "list different values of a key other than",
        ),
        "the same seed twice": (["run.seed=1,1,2,3,4,5"], "list different seeds"),
        "no name": (["run.name=null"], "give the sweep a run.name"),
        "a pruner": (["sweep.sampler=tpe"], "leave out sweep=optuna"),
        "care is negative": (["sweep.care=-1"], "sweep.care"),
        "another sweeper": (["hydra/sweeper=basic"], "need hydra/sweeper=mingpt_ddp"),
    }
    for what, (words, expected) in cases.items():
        done = call([*python_main(), "-m", *SWEEP, *words], tmp_path, separate=True)
        assert done.returncode == 2 and expected in done.stderr.splitlines()[-1], what
        assert not (tmp_path / "outputs").exists(), what


def test_another_rule_in_the_same_directory_is_refused(tmp_path):
    sweep = tmp_path / "outputs" / "lr"
    sweep.mkdir(parents=True)
    rule = {
        "settings": ["optimizer.lr=0.01", "optimizer.lr=1e-07"],
        "seeds": [*map(str, SEEDS)],
        "metric": None,
        "care": 0.5,
        "runs": {},
        "decided": {},
    }
    (sweep / "sweep.json").write_text(json.dumps({"until_decided": rule}))
    done = call([*python_main(), "-m", *SWEEP], tmp_path, separate=True)
    assert done.returncode == 2 and "care=0.5, but now care is None" in done.stderr.splitlines()[-1]
    done = call([*python_main(), "-m", *SWEEP, "sweep.care=0.5", "run.seed=2,1,3,4,5"], tmp_path)
    assert done.returncode == 2 and "add seeds at the end only" in done.stdout


SCHEDULE = """
from mingpt_ddp.registry import ScheduleConfig, register

@register("schedule", "mine", ScheduleConfig)
def mine(step, steps, config):
    return {}
"""
USER = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def test_versions_stop_when_one_is_worse_or_has_the_same_bits(tmp_path):
    project = tmp_path / "project"
    (project / "recipe").mkdir(parents=True)

    def git(*words: str) -> None:
        subprocess.run(["git", *USER, *words], cwd=project, check=True, capture_output=True)

    git("init", "-q")
    (project / ".gitignore").write_text("outputs/\noutput-*\n")
    (project / "recipe" / "mine.py").write_text(SCHEDULE.format(1.0))
    git("add", ".")
    git("commit", "-qm", "one")
    words = [*SHORT, "--config-dir=recipe", "optimizer.code=mine.py", "optimizer.schedule=mine"]
    words += ["optimizer.lr=0.01", f"run.seed={','.join(map(str, SEEDS))}", "until=decided"]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def trained() -> int:
        return len([*project.glob("outputs/versions-*/*/result.json")])

    (project / "recipe" / "mine.py").write_text("# a comment\n" + SCHEDULE.format(1.0))
    same = call(tool("versions", "HEAD", ".", *words), project, separate=True, **env)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "the same bits with seed 1, 2, 3\n" in same.stdout and trained() == 6

    (project / "recipe" / "mine.py").write_text(SCHEDULE.format(1e-6))
    worse = call(tool("versions", "HEAD", ".", *words), project, separate=True, **env)
    assert worse.returncode == 0, worse.stdout + worse.stderr
    assert re.search(r"HEAD is better than \. by .*sequential test after \d+ paired", worse.stdout)
    assert 10 <= trained() - 6 < 20
    diverged = call(tool("versions", "HEAD", ".", *words, "optimizer.lr=1e30"), project, **env)
    assert diverged.returncode == 2 and "not decided: seed 1 of HEAD diverged" in diverged.stdout
    few = call(tool("versions", "HEAD", ".", *words, "run.seed=1,2,3"), project, separate=True)
    assert few.returncode == 2 and "give at least 5 seeds" in few.stderr


@pytest.mark.integration
@pytest.mark.timeout(3 * PATIENCE_S)  # up to ten rounds, each with new processes
def test_an_external_launcher_gets_one_seed_of_all_settings_at_a_time(tmp_path):
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10"]
    done = call([*python_main(), "-m", *SWEEP, *launcher], tmp_path, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout
    sweep = tmp_path / "outputs" / "lr"
    n = len(decided(sweep)["optimizer.lr=1e-07"])
    assert 5 <= n < len(SEEDS)
    assert seeds_of(sweep, "0.01") == seeds_of(sweep, "1e-07") == [*SEEDS][:n]
