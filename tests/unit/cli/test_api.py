"""The functions of `import mingpt_ddp`. tests/e2e/test_api.py covers training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from fake_runs import fake_run
from launching import PATIENCE_S, ROOT, is_running, wait_for
from omegaconf import OmegaConf

import mingpt_ddp
from mingpt_ddp.errors import ConfigError, DataError, RunError, SnapshotError

DOCS = ROOT / "docs"
FORMAT_2 = ROOT / "tests" / "data" / "format2" / "gpt-adamw" / "run"


def test_the_import_loads_no_library():
    code = (
        "import mingpt_ddp, sys; print(sorted({'torch', 'numpy', 'hydra', 'pydantic', "
        "'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_loaded_model():
    run = mingpt_ddp.load(FORMAT_2)
    assert not run.model.training
    ids = torch.tensor([run.tokenizer.encode("the sea")] * 2)
    logits = run.model(ids)
    characters = set((FORMAT_2.parent / "text.txt").read_text())
    assert logits.shape == (2, 7, len(characters))
    torch.testing.assert_close(logits[0], logits[1])
    assert run.step == 4
    assert mingpt_ddp.load(str(FORMAT_2), step=4).config["run"]["seed"] == run.config["run"]["seed"]


def test_generated_text_depends_only_on_the_seed():
    run = mingpt_ddp.load(FORMAT_2)
    one = run.generate("the ", max_new_tokens=40)
    assert one.startswith("the ") and len(one) == 44
    assert run.generate("the ", max_new_tokens=40) == one
    assert run.generate("the ", max_new_tokens=40, seed=2) != one
    greedy = run.generate("the ", 9, temperature=0)
    ids = run.tokenizer.encode("the ")
    for _ in range(9):
        ids.append(int(run.model(torch.tensor([ids]))[0, -1].argmax()))
    assert greedy == run.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: mingpt_ddp.load("nothing"),
            SnapshotError,
            "there is no whole snapshot at nothing",
        ),
        (
            lambda: mingpt_ddp.load(FORMAT_2, step=3),
            SnapshotError,
            "there is no snapshot with step=3",
        ),
        (
            lambda: mingpt_ddp.load(FORMAT_2).generate("\u2603"),
            DataError,
            "the model does not know",
        ),
        (
            lambda: mingpt_ddp.load(FORMAT_2).generate(temperature=-1),
            ConfigError,
            "temperature=-1 must be greater than",
        ),
        (lambda: mingpt_ddp.history(DOCS), RunError, "name a run or the directory of a sweep"),
        (lambda: mingpt_ddp.history(ROOT / "setup.cfg"), RunError, "is not a run directory"),
        (lambda: mingpt_ddp.rows(DOCS), RunError, "there is no run in "),
        (lambda: mingpt_ddp.rows(), ConfigError, "rows takes one directory"),
        (lambda: mingpt_ddp.rows(["a"]), ConfigError, "rows takes one directory"),
        (lambda: mingpt_ddp.rows(""), ConfigError, "rows takes one directory"),
        (lambda: mingpt_ddp.train(["-m", "run.seed=1,2"]), ConfigError, "train runs one job"),
        (
            lambda: mingpt_ddp.train("run.seed=1"),
            ConfigError,
            "train takes a list of overrides: train(['run.seed=1'])",
        ),
        (
            lambda: mingpt_ddp.sweep("a=1"),
            ConfigError,
            "sweep takes a list of overrides: sweep(['a",
        ),
        (lambda: mingpt_ddp.sweep(None), ConfigError, "not None: sweep(["),
        (lambda: mingpt_ddp.sweep([1, 2]), ConfigError, "not [1, 2]: sweep(["),
        (lambda: mingpt_ddp.sweep(b"ab"), ConfigError, "not b'ab': sweep(["),
        (
            lambda: mingpt_ddp.sweep(OmegaConf.create({"a": 1})),
            ConfigError,
            "not {'a': 1}: sweep([",
        ),
        # errors of the training process
        (lambda: mingpt_ddp.train(["data.path=nowhere"]), DataError, "there is no such file"),
        (
            lambda: mingpt_ddp.train(["optimizer.lr=1,2"]),
            ConfigError,
            "; a sweep trains a job with each value (-m, or mingpt_ddp.sweep)",
        ),
        (
            lambda: mingpt_ddp.train(["optimizer.lr=interval(1,2)"]),
            ConfigError,
            "; a sweep trains a job with each value (-m, or mingpt_ddp.sweep)",
        ),
    ],
)
def test_an_error_is_raised_as_one_line_and_not_printed(call, kind, message, capfd):
    """A script or a notebook shows the exception itself, so printing it would show it twice."""
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_history_has_each_step_once(tmp_path):
    one, two = {"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": 2.8, "lr": 0.1}
    first = [{"start": 1.0, "step": 0}, one, {"step": 2, "train_loss": 2.9}]
    records = [*first, {"start": 2.0, "step": 1}, two]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    assert mingpt_ddp.history(tmp_path) == [one, two]


def test_the_history_of_a_sweep_has_the_rows_of_every_job(tmp_path):
    for seed in (1, 2):
        fake_run(tmp_path / f"job{seed}", {"run.seed": seed}, val_loss=float(seed))
    rows = mingpt_ddp.history(tmp_path)
    assert [(row["job"], row["run.seed"], row["step"]) for row in rows if "val_loss" in row] == [
        (f"job{seed}", seed, step) for seed in (1, 2) for step in (20, 40, 60, 80, 100)
    ]
    assert mingpt_ddp.history(tmp_path / "job1")[0].keys().isdisjoint({"job", "run.seed"})


def test_the_rows_of_a_sweep(tmp_path):
    fake_run(tmp_path / "a", {"optimizer.lr": 0.1, "run.seed": 2}, val_loss=3.0)
    fake_run(tmp_path / "b", {"optimizer.lr": 0.2}, None, 1.0, steps=60)
    fake_run(tmp_path / "c", {"optimizer.lr": 0.3}, val_loss=2.0, bits_per_byte=1.5)
    failure = {"job": "lr=0.2", "directory": "b", "reason": "no memory"}
    (tmp_path / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    rows = mingpt_ddp.rows(tmp_path)
    assert [list(row.values()) for row in rows] == [
        ["c", f"{tmp_path}/c", "complete", 1337, None, 0.3, 100, 2.0, 61.5, 1.5, 1.5],
        ["a", f"{tmp_path}/a", "complete", 2, None, 0.1, 100, 3.0, 61.5, None, None],
        ["b", f"{tmp_path}/b", "failed", 1337, None, 0.2, 60, 1.0, None, None, None],
    ]
    keys = "name directory status seed code optimizer.lr step val_loss wall_seconds"
    assert {" ".join([*row][:9]) for row in rows} == {keys}
    assert mingpt_ddp.rows(tmp_path / "a", str(tmp_path / "b"))[1]["name"] == "b"


def test_rows_of_the_best_setting_come_before_the_luckiest_seed(tmp_path):
    for lr, losses in ((0.1, (1.9, 3.0)), (0.2, (2.0, 2.1))):
        for seed, loss in enumerate(losses):
            values = {"optimizer.lr": lr, "run.seed": seed}
            fake_run(tmp_path / f"{lr}-{seed}", values, val_loss=loss)
    assert [row["val_loss"] for row in mingpt_ddp.rows(tmp_path)] == [2.0, 2.1, 1.9, 3.0]
    rows = mingpt_ddp.rows(tmp_path, metric="-val_loss")
    assert [row["val_loss"] for row in rows] == [3.0, 1.9, 2.1, 2.0]
    (tmp_path / "sweep.json").write_text('{"metric": "-val_loss"}')
    assert mingpt_ddp.rows(tmp_path) == rows, "the metric of the sweep"
    with pytest.raises(RunError, match="metric=val_los: no run has this number; did you mean val_"):
        mingpt_ddp.rows(tmp_path, metric="val_los")


# Stands in for the training process. The first interrupt asks it to save, which never finishes.
SAVES_FOR_EVER = """#!{python}
import os, pathlib, signal, time
signal.signal(signal.SIGINT, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("pid").write_text(str(os.getpid()))
while True:
    time.sleep(1)
"""
CALLER = "import sys, mingpt_ddp; sys.executable = sys.argv[1]; mingpt_ddp.train([])"


def test_the_second_interrupt_of_a_caller_kills_the_training(tmp_path):
    program, pid = tmp_path / "program", tmp_path / "pid"
    program.write_text(SAVES_FOR_EVER.format(python=sys.executable))
    program.chmod(0o755)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: pid.exists() and pid.read_text())
    caller.send_signal(signal.SIGINT)
    wait_for((tmp_path / "asked").exists)
    caller.send_signal(signal.SIGINT)
    assert caller.communicate(timeout=PATIENCE_S)[1].endswith(b"KeyboardInterrupt\n")
    assert not is_running(int(pid.read_text()))
