"""Check runs that run out of memory. A run that does not fit ends at once.

If it did fit and fails later, it restarts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import TINY, call, committed, python_main, torchrun
from runs import fail

# Rank 1 runs out of memory in its <at>-th pass of each start, but at most <times> times in all
# starts. If <at> is 0, it runs out of memory in evaluation.
MODEL = """
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from mingpt_ddp.registry import ModelConfig, register

FAILURES = Path(__file__).with_name("failures")


class Greedy(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.passes = 0

    def forward(self, tokens, targets=None):
        self.passes += self.training
        is_due = self.passes == <at> and self.training
        is_due = is_due or (<at> == 0 and not self.training)
        if is_due and os.environ.get("RANK") == "1":  # skips rank zero's trial before the run
            with open(FAILURES, "a+") as file:
                file.seek(0)
                if len(file.read()) < <times>:
                    file.write("x")
                    file.flush()
                    <allocate>
        logits = self.scores(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


register("model", "greedy", ModelConfig)(Greedy)
"""
PRESET = "name: greedy\narchitecture: greedy\ncode: greedy.py\n"
OF_CPU = "torch.empty(1 << 50, dtype=torch.uint8)"
OF_GPU = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
LAUNCHERS = {
    "nproc_per_node": [*python_main(), "ddp.nproc_per_node=2", "ddp.max_restarts=2"],
    "torchrun": torchrun(2, "--max-restarts=2"),
}
FIRST = "a micro-batch of 6 does not fit"
FIRST_EVALUATION = "the first evaluation does not fit"


def train(
    tmp_path: Path, launcher: str, allocate: str, at: int, times: int
) -> tuple[int, str, int]:
    """Train. Return the exit code, the output and the number of starts that ran out of memory."""
    preset = tmp_path / "model" / "greedy.yaml"
    preset.parent.mkdir()
    preset.write_text(PRESET)
    text = MODEL.replace("<at>", str(at)).replace("<times>", str(times))
    (tmp_path / "greedy.py").write_text(text.replace("<allocate>", allocate))
    options = [option for option in TINY if not option.startswith("model")]
    command = [
        *LAUNCHERS[launcher],
        *options,
        "model=greedy",
        "run.name=run",
        "trainer.device=cpu",
        "snapshot.background=false",
        f"--config-dir={tmp_path}",
    ]
    done = call(command, tmp_path)
    failures = tmp_path / "failures"
    assert failures.exists(), done.stdout
    return done.returncode, done.stdout, len(failures.read_text())


@pytest.mark.parametrize(
    ("launcher", "allocate", "at", "message"),
    [
        ("nproc_per_node", OF_CPU, 1, FIRST),  # fails in the warm-up
        ("nproc_per_node", OF_GPU, 4, FIRST),  # fails in the second step, after two warm-up passes
        ("nproc_per_node", OF_CPU, 0, FIRST_EVALUATION),
        ("torchrun", OF_CPU, 1, FIRST),
        ("torchrun", OF_GPU, 3, FIRST),
    ],
)
def test_a_run_that_does_not_fit_is_not_restarted(tmp_path, launcher, allocate, at, message):
    code, text, failures = train(tmp_path, launcher, allocate, at, times=9)
    assert code == (2 if launcher == "nproc_per_node" else 1), text
    assert failures == 1
    (line,) = [line for line in text.splitlines() if message in line]
    assert "config error: " in line
    assert "lower trainer.micro_batch_size, or set trainer.activation_checkpointing=true" in line
    assert 'greedy.py", line' not in text, "a stack trace"
    if launcher == "nproc_per_node":
        assert "restart 1" not in text
        assert text.splitlines()[-1] == line
    run = tmp_path / "outputs" / "run"
    assert (run / "config.yaml").exists()
    assert committed(run) == ([4] if message == FIRST_EVALUATION else [])


def test_a_run_that_runs_out_of_memory_later_restarts(tmp_path):
    code, text, failures = train(tmp_path, "nproc_per_node", OF_CPU, at=8, times=1)
    assert code == 0, text
    assert failures == 1
    assert "resuming from the snapshot of step 4" in text
    assert committed(tmp_path / "outputs" / "run")[-1] == 12


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    """The first large matrix of the model would take 4 TB."""
    options = ["model=gpt_nano", "model.n_head=1", "model.n_embd=600000", "trainer.device=cpu"]
    text = fail([*python_main(), *TINY, *options], tmp_path)
    line = text.splitlines()[-1]
    expected = "config error: the model gpt_nano does not fit into the memory of rank 0; choose a "
    assert line.startswith(expected)
