"""Train a GPT that places its own layers on several GPUs, under DistributedDataParallel.

    python main.py --config-dir=examples model=model_parallel ddp.nproc_per_node=2 \
        trainer.max_steps=20

On a machine with four GPUs, each of the two ranks has two: local rank 0 has GPUs 0 and 2, local
rank 1 has GPUs 1 and 3. Without a GPU all layers are on the CPU. The layout does not change the
results. The GPUs of a rank work one after the other: they make room for a larger model, but they
are not faster than one.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.registry import ModelConfig, check, register


@dataclass(frozen=True)
class ModelParallelConfig(ModelConfig):
    """The keys of model=model_parallel."""

    n_layer: int
    n_head: int
    n_embd: int  # width of the residual stream

    def __post_init__(self) -> None:
        check(self.n_layer >= 1, f"model.n_layer={self.n_layer} must be at least 1")
        divides = self.n_head >= 1 and self.n_embd % self.n_head == 0
        check(divides, f"model.n_head={self.n_head} must divide model.n_embd={self.n_embd}")


class Block(nn.Module):
    """A block of causal attention and an MLP, which both add to the residual stream."""

    def __init__(self, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_1 = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.norm_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


@register("model", "model_parallel", ModelParallelConfig)
class ModelParallel(nn.Module):
    def __init__(self, config: ModelParallelConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(block_size, config.n_embd)
        self.blocks = nn.ModuleList(
            Block(config.n_head, config.n_embd) for _ in range(config.n_layer)
        )
        self.head = nn.Sequential(nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, vocab_size))

    def to_devices(self, device: torch.device) -> None:
        """Move the layers to the devices of this rank.

        The embeddings go to the first device, and the head goes to the last one. Each device gets
        an equal number of consecutive blocks. mingpt_ddp calls this method instead of `to`.

        Args:
            device: The rank's own device. `forward` gets its batch there and returns its result
                there.
        """
        devices = gpus_of_rank(device) if device.type == "cuda" else [device]
        self.token_embedding.to(device)
        self.position_embedding.to(device)
        for number, block in enumerate(self.blocks):
            block.to(devices[number * len(devices) // len(self.blocks)])
        self.head.to(devices[-1])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x.to(device_of(block)))
        logits = self.head(x.to(device_of(self.head)))  # (B, T, vocab_size)
        if targets is None:
            return logits.to(tokens.device)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(logits.device))
        return loss.to(tokens.device)


def gpus_of_rank(first: torch.device) -> list[torch.device]:
    """List the GPUs of this rank. With n local ranks, it has every n-th GPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by the launcher
    numbers = range(first.index or 0, torch.cuda.device_count(), local_ranks)
    return [torch.device("cuda", number) for number in numbers]


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
