"""Make six changes for research, each in a short file. Two kills must not change the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from holding import KILL_HOOK
from launching import TINY, call, python_main
from runs import read_history, read_result, tensor_files, write_files

MAX_LINES = 25
TWO_RANKS = [*TINY, "--config-dir=mine", "ddp.nproc_per_node=2", "ddp.max_restarts=0"]
# A snapshot is committed before the next step begins, so no kill can come before the commit.
SETTINGS = [*TWO_RANKS, "trainer.eval_every=4", "snapshot.background=false", "+data.code=kill.py"]

SCHEDULE = """
import math
from dataclasses import dataclass
from mingpt_ddp.registry import ScheduleConfig, register

@dataclass(frozen=True)
class CyclicConfig(ScheduleConfig):
    period: int = 5

@register("schedule", "cyclic", CyclicConfig)
def cyclic(step, steps, config):
    return (1 + math.cos(2 * math.pi * step / config.period)) / 2 + step / steps / 10
"""
CLIP_BY_VALUE = """
from mingpt_ddp.registry import acts

@acts("gradients")
def clip_by_value(step, gradients):
    clipped = sum((gradient.abs() > 0.01).sum() for gradient in gradients.values())
    for gradient in gradients.values():
        gradient.clamp_(-0.01, 0.01)
    return {"clipped": (clipped, sum(gradient.numel() for gradient in gradients.values()))}
"""
EXACT_MATCH = """
from mingpt_ddp.registry import acts

PROMPTS = ["The ", "a", "class ", "def ", "import ", "is ", "of ", "return ", "to ", "x = "]

@acts("evaluation")
def exact_match(evaluation):
    texts = [evaluation.generate(prompt, 3) for prompt in PROMPTS]
    assert all(len(text) == 3 for text in texts) and not evaluation.model.training
    return {"exact_match": (sum(" " in text for text in texts), len(PROMPTS))}
"""
MOVING_AVERAGE = """
from mingpt_ddp.registry import acts

@acts("gradients")
class MovingAverage:
    def __init__(self):
        self.averages, self.steps = {}, 0

    def __call__(self, step, gradients):
        self.steps += 1
        for name, gradient in gradients.items():
            average = self.averages.setdefault(name, gradient.clone())
            gradient.copy_(average.lerp_(gradient, 0.2))
        return {"averaged": self.steps}

    def state_dict(self):
        return {**self.averages, "steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.pop("steps")
        self.averages = state
"""
PROJECTION = """
from mingpt_ddp.registry import acts

@acts("update")
def project(step, weights):
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    for weight in matrices:
        weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=0.1) / 0.1)
    return {"longest": max(weight.norm(dim=1).max() for weight in matrices)}
"""
CODE = "+task.code=mine.py"
AUXILIARY_LOSS = """
from mingpt_ddp.registry import TaskConfig, register
from mingpt_ddp.tasks import LanguageModel
from torch.nn import functional as F

@register("task", "z_loss", TaskConfig)
class ZLoss(LanguageModel):
    def loss(self, model, batch):
        tokens, targets = self.in_ids_of_model(batch)
        logits = model(tokens).float()
        log_z = logits.logsumexp(dim=-1)
        losses = {
            "text": F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            "z": 1e-4 * log_z.square().mean(),
        }
        return losses, {"log_z": (log_z.sum(), log_z.numel())}
"""
CHANGES = {
    "auxiliary loss": (AUXILIARY_LOSS, [CODE, "task.name=z_loss"], "train_log_z"),
    "schedule": (SCHEDULE, ["+optimizer.code=mine.py", "optimizer.schedule=cyclic"], "lr"),
    "clipping by value": (CLIP_BY_VALUE, [CODE], "train_clipped"),
    "exact match": (EXACT_MATCH, [CODE], "val_exact_match"),
    "moving average": (MOVING_AVERAGE, [CODE], "train_averaged"),
    "moving average, zero1": (MOVING_AVERAGE, [CODE, "ddp.strategy=zero1"], "train_averaged"),
    "projection": (PROJECTION, [CODE], "train_longest"),
}


# The other changes use the same code: their hooks act on other tensors, or they have no hook.
QUICK = ("auxiliary loss", "exact match", "moving average")


def case(change: str) -> Any:
    marks = [] if change in QUICK else [pytest.mark.slow]
    return pytest.param(change, id=change, marks=marks)


def train(cwd: Path, overrides: list[str], kill_at: int = 0) -> Any:
    command = [*python_main(), *SETTINGS, "run.name=run", *overrides]
    return call(command, cwd, KILL_AT=str(kill_at))


@pytest.mark.parametrize("change", [case(change) for change in CHANGES])
def test_two_kills_do_not_change_the_bits(change, tmp_path):
    code, overrides, column = CHANGES[change]
    assert len(code.strip().splitlines()) <= MAX_LINES
    write_files(tmp_path / "mine", {"mine.py": code, "kill.py": KILL_HOOK})
    done = train(tmp_path, overrides)
    assert done.returncode == 0, done.stdout
    killed = [*overrides, "run.root=killed"]
    assert train(tmp_path, killed, kill_at=7).returncode != 0
    assert train(tmp_path, killed, kill_at=10).returncode != 0
    done = train(tmp_path, killed)
    assert done.returncode == 0, done.stdout
    assert "snapshot of step 8 " in done.stdout
    runs = [tmp_path / root / "run" for root in ("outputs", "killed")]
    assert tensor_files(runs[0], 12) == tensor_files(runs[1], 12)
    series = [dict(read_history(run).series(column)) for run in runs]
    assert series[0] == series[1]
    assert len({*series[0].values()}) > 1 or change == "exact match"
    assert read_result(runs[0])["step"] == 12
