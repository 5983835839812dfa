"""Check that hooks may act on gradients, weights and evaluations, and that kills change no bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from launching import TINY, call, python_main
from runs import read_history, read_result, weights, write_files

HOOKS = """
import torch
from mingpt_ddp.registry import acts

@acts("gradients")
def clip_by_value(step, gradients):
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for gradient in gradients.values():
        gradient.clamp_(-0.01, 0.01)
    return {"largest": largest}

@acts("update")
def project(step, weights):
    for name, weight in weights.items():
        if weight.dim() == 2:
            weight.clamp_(-0.05, 0.05)
    return {"outer": (sum((w.abs() == 0.05).sum() for w in weights.values()), 10)}

@acts("evaluation")
def exact_match(evaluation):
    assert not evaluation.model.training and not torch.is_grad_enabled()
    texts = [evaluation.generate(prompt, 4) for prompt in ("The ", "a", "class")]
    assert all(len(text) == 4 for text in texts)
    return {"exact_match": (sum(text == "abcd" for text in texts), len(texts))}
"""
SETTINGS = [
    *TINY,
    "--config-dir=mine",
    "+task.code=hooks.py",
    "run.name=run",
    "trainer.log_every=1",
    "trainer.eval_every=4",
    "trainer.grad_norm_clip=null",
]


def project(cwd: Path, hooks: str = HOOKS) -> Path:
    return write_files(cwd, {"mine/hooks.py": hooks})


def train(cwd: Path, *overrides: str) -> Any:
    return call([*python_main(), *SETTINGS, *overrides], cwd)


def rows(run: Path) -> list[dict[str, Any]]:
    keys = ("step", "train_loss", "grad_norm", "train_largest", "train_outer", "val_exact_match")
    found = []
    for row in read_history(run).rows:
        found.append({key: row[key] for key in keys if key in row})
    return [row for row in found if len(row) > 1]


def test_metrics_of_hooks_are_the_same_on_any_number_of_ranks(tmp_path):
    """With canonical reduction, the weights are the same too."""
    found = []
    for ranks in (1, 2, 3):
        cwd = project(tmp_path / str(ranks))
        more = ["ddp.reduction=canonical", "trainer.micro_batch_size=4", "trainer.batch_size=12"]
        done = train(cwd, *more, f"ddp.nproc_per_node={ranks}")
        assert done.returncode == 0, done.stdout
        run = cwd / "outputs" / "run"
        found.append((rows(run), weights(run)))
    assert found[0] == found[1] == found[2]


def test_a_sharded_model_gives_each_rank_its_rows(tmp_path):
    hooks = HOOKS.replace("[evaluation.generate(prompt, 4)", "['abcd'").replace(
        "len(texts))}", "3)}"
    )
    cwd = project(tmp_path, hooks)
    done = train(cwd, "ddp.nproc_per_node=2", "ddp.strategy=fsdp")
    assert done.returncode == 0, done.stdout
    assert read_result(cwd / "outputs" / "run")["val_exact_match"] == 1.0


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_mistake_is_reported_in_one_line_and_nothing_is_written(ranks, tmp_path):
    """This also holds for a mistake that only rank 1 makes."""
    failing = "assert int(os.environ.get('RANK', 1)) == 0"
    hooks = "import os\n" + HOOKS.replace("    largest =", f"    {failing}\n    largest =")
    cwd = project(tmp_path, hooks)
    done = train(cwd, f"ddp.nproc_per_node={ranks or 'null'}", "ddp.max_restarts=0")
    assert done.returncode == 2, done.stdout
    *before, line = done.stdout.splitlines()
    assert "hooks.py:8: AssertionError" in line
    assert ranks or not before
    assert not (cwd / "outputs").exists()


def test_ranks_that_act_differently_are_refused(tmp_path):
    """The ranks differ only from the third trial step on."""
    differing = "    gradients[max(gradients)].mul_(1 + int(os.environ['RANK']) * (step == 3))\n"
    hooks = "import os\n" + HOOKS.replace(
        '    return {"largest', f'{differing}    return {{"largest'
    )
    cwd = project(tmp_path, hooks)
    done = train(cwd, "ddp.nproc_per_node=2", "ddp.max_restarts=0")
    assert done.returncode == 2, done.stdout
    last = done.stdout.splitlines()[-1]
    assert (
        "clip_by_value of @acts('gradients') leaves other values on rank 1 than on rank 0" in last
    )
    assert not (cwd / "outputs").exists()


def test_an_exception_in_training_ends_the_run(tmp_path):
    cwd = project(tmp_path, HOOKS.replace("    largest =", "    assert step < 5\n    largest ="))
    done = train(cwd, "ddp.nproc_per_node=2")
    assert done.returncode != 0
    assert "hooks.py:7: AssertionError" in done.stdout


STATE = """
import os, torch
from mingpt_ddp.registry import acts

RANK = int(os.environ.get("RANK", 0))

@acts("update")
class Last:
    def __init__(self):
        self.last, self.steps = {}, 0

    def __call__(self, step, weights):
        self.last = {name: weight.clone() for name, weight in weights.items()}
        self.steps += 1
        if step > 4:
            pass

    def state_dict(self):
        return self.last | {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.pop("steps")
        self.last = state

@acts("evaluation")
def measured(evaluation):
    return {"first": 1.0} if evaluation.step <= 4 else {"late": 1.0}
"""
OTHER_STATE = (
    r"Last of @acts\('update'\): state_dict\(\)\['steps'\] on rank 1 differs from rank 0 at step 8"
)


@pytest.mark.parametrize(
    ("late", "name", "message"),
    [
        ("self.steps += RANK", "late", OTHER_STATE),
        (
            "self.last = dict(weights)",
            "late",
            r"hooks\.py:\d+: Last of @acts\('update'\) .*its state holds a weight itself; keep a",
        ),
        ("pass", "late{RANK}", r"ranks 0 and 1 have different losses or metrics: late0, late1;"),
    ],
    ids=["other state", "a weight itself", "other metrics"],
)
def test_a_hook_that_changes_after_its_trial_ends_the_run(late, name, message, tmp_path):
    """The error is one line, and the last snapshot is from before it."""
    hooks = STATE.replace("pass", late).replace('"late"', f'f"{name}"')
    cwd = project(tmp_path, hooks)
    more = ["ddp.nproc_per_node=2", "ddp.max_restarts=0", "snapshot.every_steps=4"]
    done = train(cwd, *more, "snapshot.background=false")  # it is committed before the next step
    assert done.returncode == 2, done.stdout
    [line] = [line for line in done.stdout.splitlines() if "error: " in line]
    assert re.search(message, line)
    saved = cwd.glob("outputs/run/snapshots/*/manifest.json")
    assert [path.parent.name for path in saved] == ["step_00000004"]
