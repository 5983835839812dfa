"""Check that hooks in a user's file observe a run without changing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import TINY, call, python_main
from runs import error_line, read_result, write_files

HOOKS = """
import json
import torch
from mingpt_ddp.registry import on

def write(kind, *values):
    with open("seen.jsonl", "a") as file:
        print(json.dumps([kind, *values]), file=file)

@on("step")
def look(step, metrics):
    write("step", step, metrics["train/loss"])
    metrics.clear()
    torch.rand(3)

@on("evaluate")
def compare(step, metrics):
    write("evaluate", step, metrics["loss"])
    metrics["loss"] = 0.0
    if step == 6:
        raise KeyError("no such thing")

@on("end")
def end(result):
    write("end", result["step"], result["val_loss"])
    result["status"] = "mine"
"""


def train(cwd: Path, *overrides: str):
    return call([*python_main(), *TINY, "run.name=run", *overrides], cwd)


@pytest.mark.parametrize("ranks", [0, 2])
def test_hooks_see_a_run_and_do_not_change_it(ranks, tmp_path):
    (tmp_path / "plain").mkdir()
    with_hooks, ranked = tmp_path / "hooks", [f"ddp.nproc_per_node={ranks}"]
    (with_hooks / "mine").mkdir(parents=True)
    (with_hooks / "mine" / "hooks.py").write_text(HOOKS)
    added = ["--config-dir=mine", "+task.code=hooks.py"]
    done = train(with_hooks, *ranked, *added, "trainer.log_every=3")
    assert done.returncode == 0, done.stdout
    assert "hooks.py:21: KeyError: 'no such thing'" in done.stdout
    result = read_result(with_hooks / "outputs" / "run")
    assert result["status"] == "complete"
    seen = [json.loads(line) for line in (with_hooks / "seen.jsonl").read_text().splitlines()]
    assert [entry[:2] for entry in seen] == [
        ["step", 3],
        ["step", 6],
        ["evaluate", 6],  # this call fails, so the hook is not called again
        ["step", 9],
        ["step", 12],
        ["end", 12],
    ]
    assert seen[-1][2] == result["val_loss"]
    if not ranks:
        assert train(tmp_path / "plain", "trainer.log_every=3").returncode == 0
        last = Path("outputs", "run", "snapshots", "step_00000012", "model.safetensors")
        assert (with_hooks / last).read_bytes() == (tmp_path / "plain" / last).read_bytes()


def test_an_unknown_event_is_reported_in_one_line(tmp_path):
    code = 'from mingpt_ddp.registry import on\n\n@on("steps")\ndef look(step):\n    pass\n'
    write_files(tmp_path, {"mine/hooks.py": code})
    done = train(tmp_path, "--config-dir=mine", "+task.code=hooks.py")
    assert done.returncode == 2, done.stdout
    assert "the event must be one of step, evaluate, end" in error_line(done.stdout)
