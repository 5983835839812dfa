"""A user's model on two ranks, whose forward passes update its buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from launching import TINY
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.distributed.env import read_env
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.registry import ModelConfig, register
from mingpt_ddp.snapshots import format as snapshot_format
from mingpt_ddp.training.run import run
from multiprocess.ranks import configure, run_ranks

STEPS = 6


class Mean(nn.Module):
    """Logits minus their running mean, which each rank computes from its own micro-batches."""

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


def train(configs: list[dict[str, Any]]) -> list[float]:
    """Train one run after the other; each rank writes its shard of the snapshots, however small."""
    register("model", "mean", ModelConfig)(Mean)
    snapshot_format.MIN_SHARD_BYTES = 1
    losses = []
    for job, values in enumerate(configs):
        runtime = Runtime(from_mapping(values), read_env(), job)
        losses.append(run(from_mapping(values), runtime, {}))
        runtime.close()
    return losses


def state(run: Path) -> dict[str, Tensor]:
    files = sorted((run / "snapshots" / f"step_{STEPS:08d}").glob("model*.safetensors"))
    assert len(files) == 2
    return {
        name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()
    }


def test_buffers_that_ranks_fill_differently_resume_byte_for_byte(tmp_path):
    def settings(name: str, steps: int) -> dict[str, Any]:
        overrides = [
            "optimizer.schedule=constant",
            "trainer.micro_batch_size=2",
            "trainer.eval_every=null",
        ]
        values = configure(
            *TINY,
            *overrides,
            f"run.root={tmp_path}",
            f"run.name={name}",
            f"trainer.max_steps={steps}",
        )
        model = {"name": "mean", "architecture": "mean"}
        return {
            **values,
            "model": model,
            "data": {**values["data"], "cache_dir": str(tmp_path / "cache")},
        }

    configs = [settings("whole", STEPS), settings("halves", STEPS // 2), settings("halves", STEPS)]
    losses = run_ranks(2, train, tmp_path / "ranks", configs=configs)
    assert losses[0] == losses[1], "the ranks evaluated different models"
    assert losses[0][0] == losses[0][2] != losses[0][1]
    whole, resumed = state(tmp_path / "whole"), state(tmp_path / "halves")
    assert whole.keys() == resumed.keys() == {"scores.weight", "mean", "known"}
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert whole["mean"].abs().max() > 0
