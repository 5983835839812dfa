"""Check logs and restarts after errors in a user's code in the middle of training.

The contract tests check the last lines and exit codes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import TINY, call, python_main, torchrun

MODEL = """
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from mingpt_ddp.registry import ModelConfig, register

FAULTS = <faults>  # for each step, the number of attempts in which the last rank fails there
HERE = Path(__file__).parent


@dataclass(frozen=True)
class ScoresConfig(ModelConfig):
    pass


@register("model", "scores", ScoresConfig)
class Scores(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, tokens, targets=None):
        if self.training:
            self.step += 1
            fail(int(self.step))
        logits = self.scores(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fail(step):
    is_last = int(os.environ.get("RANK", "0")) + 1 == int(os.environ.get("WORLD_SIZE", "1"))
    failed = len(list(HERE.glob(f"failed-{step}-*")))
    if is_last and failed < FAULTS.get(step, 0):
        (HERE / f"failed-{step}-{failed}").touch()
        raise ValueError(f"boom in {object()}")
"""
BOOM_LINE = 'raise ValueError(f"boom in {object()}")'
LINE = MODEL.splitlines().index(f"        {BOOM_LINE}") + 1
SETTINGS = [each for each in TINY if not each.startswith(("model", "snapshot"))]
SETTINGS += ["--config-dir=mine", "model=scores", "trainer.device=cpu", "snapshot.every_steps=6"]
SETTINGS += ["snapshot.background=false"]  # step 6 must be committed before step 9 fails
BOOM = rf"ValueError: boom in <object object at \w+> \(mine/mine.py:{LINE}\)"
TWICE = (
    "this error occurred twice at the same step, so a restart would not help: fix it, then run the"
)
AGAIN = {9: 9}


def train(cwd: Path, command: list[str], faults: dict[int, int]):
    mine = cwd / "mine"
    (mine / "model").mkdir(parents=True)
    (mine / "model" / "scores.yaml").write_text("{name: s, architecture: scores, code: mine.py}")
    (mine / "mine.py").write_text(MODEL.replace("<faults>", str(faults)))
    return call([*command, *SETTINGS, "run.name=run"], cwd)


def tracebacks(cwd: Path, rank: int) -> int:
    return (cwd / "outputs" / "run" / f"main.rank{rank}.log").read_text().count("Traceback")


def weights(cwd: Path) -> bytes:
    return (cwd / "outputs/run/snapshots/step_00000012/model.safetensors").read_bytes()


@pytest.mark.parametrize("launcher", ["nproc_per_node", "torchrun"])
def test_the_same_error_at_the_same_step_is_restarted_once(tmp_path, launcher):
    by_us = launcher == "nproc_per_node"
    command = [*python_main(), "ddp.nproc_per_node=2"] if by_us else torchrun(2, "--max-restarts=3")
    done = train(tmp_path, command, AGAIN)
    assert done.returncode == (2 if by_us else 1)
    ours = done.stdout if by_us else done.stdout.partition("Traceback")[0]  # without torchrun's
    lines = [line for line in ours.splitlines() if not re.match(r"[WE]\d{4} ", line)]
    expected = rf"(\[rank 1\] )?error: rank 1: {BOOM}, in the forward pass of step 9; {TWICE}.*"
    assert re.fullmatch(expected, lines[-1]), lines[-3:]
    assert len([line for line in lines if TWICE in line]) == 1
    assert "Traceback" not in ours
    assert len(list(tmp_path.glob("mine/failed-*"))) == tracebacks(tmp_path, 1) == 2
    log = (tmp_path / "outputs" / "run" / "main.rank0.log").read_text()
    assert re.search(rf"error: rank 1: {BOOM}", log), "the other rank names it too"
    assert ours.count("resuming from the snapshot of step 6") == 1
    assert not by_us or re.findall(r"restart (\d) of", ours) == ["1"]


def test_errors_at_different_steps_are_restarted(tmp_path):
    """The run ends with the weights of a run without errors."""
    local = [*python_main(), "ddp.nproc_per_node=2"]
    done = train(tmp_path / "failing", local, {8: 1, 9: 1})
    assert done.returncode == 0, done.stdout
    assert re.findall(r"restart (\d) of", done.stdout) == ["1", "2"]
    assert train(tmp_path / "plain", local, {}).returncode == 0
    assert weights(tmp_path / "failing") == weights(tmp_path / "plain")
