"""Check that a user's file can replace a part of gpt's blocks, or train gpt on another task."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from example_files import EXAMPLES
from holding import KILL_HOOK
from launching import ROOT, TINY, call, python_main
from runs import read_result, succeed, weights, write_files

PARTS = (EXAMPLES / "parts" / "parts.py").read_text()
TWO_RANKS = [*TINY, "--config-dir=my_parts", "ddp.nproc_per_node=2", "ddp.max_restarts=0"]
# A snapshot is committed before the next step begins, so no kill can come before the commit.
SETTINGS = [*TWO_RANKS, "snapshot.background=false", "data.code=kill.py", "run.name=run"]
ALIBI = ["model.code=mine.py", "model.attention=alibi", "model.part_settings.steepness=4"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    cwd = tmp_path_factory.mktemp("project")
    return write_files(cwd, {"my_parts/mine.py": PARTS, "my_parts/kill.py": KILL_HOOK})


def train(cwd: Path, *overrides: str, kill_at: int = 0) -> Any:
    return call([*python_main(), *SETTINGS, *overrides], cwd, KILL_AT=str(kill_at))


def command(cwd: Path, *words: str) -> Any:
    return call([sys.executable, *words], cwd)


def test_a_users_attention_is_killed_resumed_sampled_and_exported(project):
    done = train(project, *ALIBI)
    assert done.returncode == 0, done.stdout
    killed = [*ALIBI, "run.root=killed"]
    assert train(project, *killed, kill_at=7).returncode != 0
    done = train(project, *killed)
    assert done.returncode == 0, done.stdout
    assert "resuming from the snapshot of step 6 " in done.stdout
    run = project / "outputs" / "run"
    assert weights(project / "killed" / "run") == weights(run)

    refused = train(project, *ALIBI[:2], "trainer.max_steps=16")  # the steepness differs
    assert refused.returncode == 2
    assert (
        "other settings: model.part_settings ({'steepness': 4} in the snapshot, None now)"
        in refused.stdout
    )
    words = [str(ROOT / "sample.py"), str(run), "max_new_tokens=30", "prompt=a"]
    done = command(project, *words, "code=my_parts/mine.py")
    assert done.returncode == 0 and len(done.stdout) >= 31, done.stdout
    done = command(project, *words)
    assert done.returncode == 2
    assert "model.attention=alibi is not built in; name the Python file that" in done.stdout
    export = ["-m", "mingpt_ddp", "snapshots", "export", str(run), f"to={project}/exported"]
    done = command(project, *export, "format=hf")
    assert done.returncode == 2
    assert "model.attention=alibi cannot be exported for transformers; use" in done.stdout
    assert not (project / "exported").exists()
    assert command(project, *export).returncode == 0, "as safetensors, without running the code"


ANSWERS = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from mingpt_ddp.data.samples import Datasets
from mingpt_ddp.registry import DatasetConfig, TaskConfig, register
from mingpt_ddp.tasks import Task

DIGITS, PROMPT = 10, 4  # a prompt is four digits, and its answer the same four backwards

@register("dataset", "backwards", DatasetConfig)
def backwards(config):
    prompts = torch.randint(DIGITS, (600, PROMPT), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([prompts, prompts.flip(1)], dim=1)
    train, val = tokens[:500], tokens[500:]
    return Datasets(*(TensorDataset(t[:, :-1], t[:, 1:]) for t in (train, val)), outputs=DIGITS)

@register("task", "answers", TaskConfig)
class Answers(Task):
    def loss(self, model, batch):  # only the answer counts
        tokens, targets = batch
        logits = model(tokens)[:, PROMPT - 1 :]
        return F.cross_entropy(logits.flatten(0, 1), targets[:, PROMPT - 1 :].flatten())
"""


def test_gpt_learns_to_answer_the_prompts_of_a_users_task(tmp_path):
    preset = "name: backwards\ndataset: backwards\ncode: mine.py\n"
    write_files(tmp_path / "mine", {"mine.py": ANSWERS, "data/backwards.yaml": preset})
    words = [
        "--config-dir=mine",
        "task.name=answers",
        "data=backwards",
        "model=gpt_nano",
        "optimizer.lr=0.01",
        "trainer.batch_size=50",
        "trainer.max_steps=40",
        "trainer.max_epochs=null",
        "optimizer.warmup_steps=5",
        "run.name=run",
    ]
    succeed([*python_main(), *words, "trainer.precision=fp32"], tmp_path)
    result = read_result(tmp_path / "outputs" / "run")
    assert result["val_loss"] < 2.0, "less than log 10, of chance"
    done = command(tmp_path, "-m", "mingpt_ddp", "evaluate", "outputs/run", "code=mine/mine.py")
    assert done.returncode == 0, done.stdout
