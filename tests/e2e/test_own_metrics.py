"""Check that metrics of a user's task and model are averaged and logged.

They are averaged over micro-batches, steps and ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from holding import kill_before
from launching import call, committed, python_main
from runs import curve, read_history, read_result, write_files
from user_code_page import page_files

import mingpt_ddp

LOSS = "return F.cross_entropy(model(x).flatten(0, 1), tags.flatten())"
WITH_METRICS = """logits = model(x)
        correct = (logits.argmax(dim=-1) == tags).sum()
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten())
        return loss, {{{name}: (correct, tags.numel())}}"""
FORWARD = "return self.head(self.gru(self.embedding(x))[0])  # (B, T, outputs)"
WITH_STEP_METRICS = """hidden = self.gru(self.embedding(x))[0]
        self.size = hidden.detach().abs().mean()
        return self.head(hidden)

    def step_metrics(self) -> dict[str, Tensor]:
        return {"hidden": self.size}"""
SETTINGS = [
    "--config-dir=my_task",
    "task=tagging",
    "model=tagger",
    "data=repeats",
    "run.name=run",
    "trainer.max_epochs=null",
    "trainer.max_steps=24",
    "trainer.batch_size=24",
    "trainer.micro_batch_size=4",
    "trainer.precision=fp32",
    "trainer.log_every=3",
    "snapshot.every_steps=4",
    "optimizer.lr=0.01",
]


def project(cwd: Path, name: str = "'correct'") -> Path:
    """Write the task of docs/your-own-model.md to a directory, with metrics."""
    for file, content in page_files("my_task").items():
        changed = content.replace(LOSS, WITH_METRICS.format(name=name))
        changed = changed.replace(FORWARD, WITH_STEP_METRICS)
        write_files(cwd, {file: changed})
        if file.endswith("mine.py"):
            assert changed.count("step_metrics") == changed.count("correct,") == 1
    return cwd


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the measurements of training, without those that depend on a clock."""
    found = []
    for row in read_history(run).rows:
        if "train_loss" in row:
            found.append({key: row[key] for key in ("step", "train_correct", "train_hidden")})
    return found


def train(cwd: Path, *overrides: str) -> Any:
    return call([*python_main(), *SETTINGS, *overrides], cwd)


def test_metrics_are_the_same_on_any_number_of_ranks(tmp_path):
    """With canonical reduction, they are the same to the last bit.

    They are also in the log and in TensorBoard.
    """
    found = {}
    for ranks in (1, 2, 3):
        cwd = project(tmp_path / str(ranks))
        done = train(cwd, "ddp.reduction=canonical", f"ddp.nproc_per_node={ranks}")
        assert done.returncode == 0, done.stdout
        found[ranks] = rows(cwd / "outputs" / "run")
        assert ", correct 0." in done.stdout and ", hidden 0." in done.stdout
    assert found[1] == found[2] == found[3]
    assert [row["step"] for row in found[1]] == [*range(3, 25, 3)]
    assert 0.3 < found[1][0]["train_correct"] < found[1][-1]["train_correct"] < 1
    run = cwd / "outputs" / "run"
    values = dict(curve(run, "train/correct"))
    assert read_result(run)["train_correct"] == found[1][-1]["train_correct"]
    assert values[24] == pytest.approx(found[1][-1]["train_correct"])


def test_metrics_survive_a_kill(tmp_path):
    """Snapshots contain the sums of the current logging interval."""
    ranks = "ddp.nproc_per_node=2"
    whole, killed = project(tmp_path / "whole"), project(tmp_path / "killed")
    assert train(whole, ranks).returncode == 0
    run = killed / "outputs" / "run"
    kill_before(7, [*python_main(), *SETTINGS, ranks], killed, lambda: committed(run))
    done = train(killed, ranks)
    assert done.returncode == 0, done.stdout
    assert rows(run) == rows(whole / "outputs" / "run")


@pytest.mark.parametrize("reduction", ["fast", "canonical"])
def test_names_that_differ_between_ranks_are_refused(reduction, tmp_path):
    cwd = project(tmp_path, name="f'correct{torch.distributed.get_rank()}'")
    file = cwd / "my_task" / "mine.py"
    rank = "torch.distributed.get_rank() if torch.distributed.is_initialized() else 0"
    file.write_text(file.read_text().replace("torch.distributed.get_rank()", f"({rank})"))
    done = train(cwd, f"ddp.reduction={reduction}", "ddp.nproc_per_node=2")
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "losses or metrics" in last and "correct1" in last and "names on every rank" in last


def test_a_metric_that_is_not_a_scalar_is_refused(tmp_path):
    cwd = project(tmp_path)
    file = cwd / "my_task" / "mine.py"
    file.write_text(file.read_text().replace(".abs().mean()", ".abs()"))
    done = train(cwd)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "the model tagger: the metric hidden must be a scalar" in line
    assert not (cwd / "outputs").exists()


def test_a_grid_is_ranked_by_the_users_own_metric(tmp_path):
    """The metric decides the order of the table, the best job and later reports.

    Another start may use another metric.
    """
    cwd = project(tmp_path)
    grid = ["-m", "optimizer.lr=0.0001,0.05", "trainer.max_steps=8"]
    for metric, better, best in (
        ("-val_accuracy", "higher", 0.05),
        ("val_accuracy", "lower", 1e-4),
    ):
        done = train(cwd, *grid, f"sweep.metric={metric}")
        assert done.returncode == 0, done.stdout
        assert f"note: ranked by val_accuracy: {better} is better" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("best: ")]
        (run,) = cwd.glob(f"outputs/run/optimizer.lr={best}-*")
        assert line.endswith(run.name)
        first, second = mingpt_ddp.rows(cwd / "outputs" / "run")
        assert first["optimizer.lr"] == best
        assert (first["val_accuracy"] > second["val_accuracy"]) == (better == "higher")
    assert done.stdout.count("already complete, val_accuracy 0.") == 2


@pytest.mark.parametrize("workers", [[], ["ddp.nproc_per_node=2"]], ids=["alone", "on workers"])
def test_a_metric_that_evaluations_lack_ends_a_job_at_its_first_evaluation(workers, tmp_path):
    cwd = project(tmp_path)
    grid = ["-m", "optimizer.lr=0.01,0.05", "trainer.eval_every=2", "sweep.metric=val_accurat"]
    done = train(cwd, *grid, *workers)
    assert done.returncode == 2, done.stdout
    line = (
        "config error: sweep.metric=val_accurat: the evaluations do not measure it; did you mean "
    )
    assert done.stdout.count(f"{line}val_accuracy?") == 2
    assert "2 of 2 jobs failed" in done.stdout.splitlines()[-1]


def test_a_search_may_maximize_a_metric_of_training(tmp_path):
    optuna = pytest.importorskip("optuna")
    cwd = project(tmp_path)
    sweep = ["-m", "sweep=optuna", "sweep.trials=2", "optimizer.lr=interval(0.001,0.1)"]
    done = train(cwd, *sweep, "sweep.metric=-train_correct", "trainer.max_steps=6")
    assert done.returncode == 0, done.stdout
    results = [read_result(file.parent) for file in cwd.glob("outputs/run/*/result.json")]
    assert len(results) == 2 and all(0 < result["train_correct"] < 1 for result in results)
    backend = optuna.storages.journal.JournalFileBackend(f"{cwd}/outputs/run/study.journal")
    study = optuna.load_study(study_name="run", storage=optuna.storages.JournalStorage(backend))
    assert study.direction.name == "MAXIMIZE"
    assert study.best_value == max(result["train_correct"] for result in results)


def test_metrics_that_are_nan_or_infinite_are_saved_and_resumed(tmp_path):
    """The run is saved in the middle of a logging interval and at the end. Records have null."""
    cwd = project(tmp_path)
    file = cwd / "my_task" / "mine.py"
    changed = file.read_text().replace("(correct,", "(correct * float('nan'),")
    changed = changed.replace("== tags).sum(), n)", "== tags).sum() * float('inf'), n)")
    assert changed.count("float('") == 2
    file.write_text(changed)
    for steps in (5, 8):
        done = train(cwd, f"trainer.max_steps={steps}")
        assert done.returncode == 0, done.stdout
    assert "resuming from" in done.stdout
    run = cwd / "outputs" / "run"
    assert [row["train_correct"] for row in rows(run)] == [None] * 4
    result = json.loads((run / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["val_accuracy"] is result["train_correct"] is None and result["val_loss"] > 0
