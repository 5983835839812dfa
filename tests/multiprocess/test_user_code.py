"""User models on two ranks: their buffers and their precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from launching import TINY
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp import torch_internals
from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import read_env
from mingpt_ddp.registry import ModelConfig, register
from mingpt_ddp.snapshots import format as snapshot_format
from mingpt_ddp.training.run import train_run
from multiprocess.ranks import configure, run_ranks

STEPS = 6


class Mean(nn.Module):
    """A model that subtracts the running mean of its logits.

    Each rank computes the mean from its own micro-batches.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
        self.register_buffer("mean", torch.zeros(vocab_size))
        self.register_buffer("known", torch.zeros(vocab_size, dtype=torch.bool))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores(tokens)
        if self.training:
            self.mean.lerp_(logits.detach().mean(dim=(0, 1)), 0.3)
            self.known[tokens] = True
        logits = logits - self.mean * self.known
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


class Product(nn.Module):
    """A model with one matrix product, which bf16 rounds."""

    def __init__(self, config: ModelConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.embedding(tokens)).float()
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


def train(configs: list[dict[str, Any]]) -> list[float]:
    """Train one run after another. Each rank writes a shard of every snapshot, however small."""
    register("model", "mean", ModelConfig)(Mean)
    register("model", "product", ModelConfig)(Product)
    torch_internals.cpu_is_fast_at_bf16 = lambda: True  # any CPU can compute in bf16
    snapshot_format.MIN_SHARD_BYTES = 1
    losses = []
    for job, values in enumerate(configs):
        logs.to_console(read_env())
        runtime = Runtime(from_mapping(values), read_env(), job)
        losses.append(train_run(Job(from_mapping(values)), runtime))
        runtime.close()
    return losses


def state(run: Path) -> dict[str, Tensor]:
    files = sorted((run / "snapshots" / f"step_{STEPS:08d}").glob("model*.safetensors"))
    assert len(files) == 2
    return {
        name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()
    }


def settings(
    root: Path, model: str, name: str, steps: int = STEPS, *overrides: str
) -> dict[str, Any]:
    values = configure(
        *TINY,
        "optimizer.schedule=constant",
        "trainer.micro_batch_size=2",
        "trainer.eval_every=null",
        f"run.root={root}",
        f"run.name={name}",
        f"trainer.max_steps={steps}",
        *overrides,
    )
    data = {**values["data"], "cache_dir": str(root / "cache")}
    return {**values, "model": {"name": model, "architecture": model}, "data": data}


def test_buffers_that_ranks_fill_differently_resume_byte_for_byte(tmp_path):
    configs = [
        settings(tmp_path, "mean", "whole"),
        settings(tmp_path, "mean", "halves", STEPS // 2),
        settings(tmp_path, "mean", "halves"),
    ]
    losses = run_ranks(2, train, tmp_path / "ranks", configs=configs)
    assert losses[0] == losses[1], "the ranks evaluated different models"
    assert losses[0][0] == losses[0][2] != losses[0][1]
    whole, resumed = state(tmp_path / "whole"), state(tmp_path / "halves")
    assert whole.keys() == resumed.keys() == {"scores.weight", "mean", "known"}
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert whole["mean"].abs().max() > 0


def test_auto_is_fp32_unless_the_run_began_in_bf16(tmp_path):
    """Built-in models would train in bf16 here. fsdp gathers weights in the same precision."""
    configs = []
    for strategy in ("ddp", "fsdp"):
        chosen = f"ddp.strategy={strategy}"
        for name, steps, precision in (
            ("whole", STEPS, "bf16"),
            ("halves", STEPS // 2, "bf16"),
            ("halves", STEPS, "auto"),
            ("new", STEPS, "auto"),
        ):
            words = (chosen, f"trainer.precision={precision}")
            configs.append(settings(tmp_path, "product", f"{strategy}-{name}", steps, *words))
    run_ranks(2, train, tmp_path / "ranks", configs=configs)
    for strategy in ("ddp", "fsdp"):
        whole, resumed, new = (
            state(tmp_path / f"{strategy}-{name}") for name in ("whole", "halves", "new")
        )
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert not all(torch.equal(whole[name], new[name]) for name in whole)
        logged = (tmp_path / f"{strategy}-new" / "main.rank0.log").read_text()
        assert "auto is fp32 for a model of your own on a CPU; try trainer.precision=bf16" in logged
        snapshot = tmp_path / f"{strategy}-new" / "snapshots" / f"step_{STEPS:08d}"
        recorded = json.loads((snapshot / "state.json").read_text())["environment"]
        assert recorded["precision"] == "fp32"
