"""A decoder of 2025: what has made small models learn faster since GPT-2, each part with its source.

Shapes: B sequences, T characters, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.
The parts were brought together by Jordan et al. 2024, "modded-nanogpt", and Karpathy 2025, "nanochat". There are no
biases and no gains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.arithmetic import attend, compute_dtype, relu_squared, rms_norm
from mingpt_ddp.groups import ModernConfig


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions and normalised queries and keys.

    Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Henry et al. 2020, "Query-Key Normalization"
    (arXiv:2010.04245).
    """

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        C = config.n_embd
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Parameter(torch.empty(3, C, C))  # three matrices, which an optimizer of matrices tells apart
        self.proj = nn.Parameter(torch.empty(C, C))
        self.value_mix = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor, rotary: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, T, C).
            rotary: (2, T, 1, 1, D) cosines and sines.
            first: (B, T, H, D) the values of the first block, None in that. The others mix them with their own: Zhou
                et al. 2024, "Value Residual Learning" (arXiv:2410.17897).

        Returns:
            (B, T, C) for the residual stream, and the values of the first block.
        """
        B, T, C = x.shape
        qkv = F.linear(x, self.qkv.flatten(0, 1)).view(B, T, 3, self.n_head, C // self.n_head)
        q, k = rotate(rms_norm(qkv[:, :, :2]), rotary).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        v = qkv[:, :, 2]
        if first is not None:
            v = self.value_mix[0] * v + self.value_mix[1] * first
        y = attend(q, k, v.transpose(1, 2), self.dropout if self.training else 0.0)
        return F.linear(y.transpose(1, 2).reshape(B, T, C), self.proj), v if first is None else first


def rotary_table(T: int, D: int, device: torch.device) -> Tensor:
    """(2, T, 1, 1, D): the cosines, and the sines with the sign that `rotate` wants."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, D // 2 + 1, device=device)[:-1]
    angles = torch.outer(torch.arange(T, device=device), frequencies)  # (T, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])[:, :, None, None]


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair of numbers (i, i + D / 2) by the angle of its position; x is (B, T, ..., D)."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, dims=-1) * rotary[1]


class Block(nn.Module):
    """Attention, then a feed-forward layer four times as wide, each added to the residual stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.empty(2))  # of the stream and of its beginning
        self.attention = Attention(config)
        self.up = nn.Parameter(torch.empty(4 * config.n_embd, config.n_embd))
        self.down = nn.Parameter(torch.empty(config.n_embd, 4 * config.n_embd))

    def forward(self, x: Tensor, x0: Tensor, rotary: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.stream_mix[0] * x + self.stream_mix[1] * x0
        y, first = self.attention(rms_norm(x), rotary, first)
        x = x + F.dropout(y, self.dropout, self.training)
        y = F.linear(relu_squared(F.linear(rms_norm(x), self.up)), self.down)
        return x + F.dropout(y, self.dropout, self.training), first


class Modern(nn.Module):
    """Characters in, scores of the next character (or the loss) out."""

    def __init__(self, config: ModernConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.smear = nn.Parameter(torch.empty(config.n_embd))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """What writes to the residual stream begins at zero, so that each block begins as the identity."""
        nn.init.normal_(self.token_embedding.weight)
        nn.init.zeros_(self.smear)
        nn.init.zeros_(self.head.weight)
        bound = (3 / self.config.n_embd) ** 0.5
        for block in self.blocks:
            nn.init.uniform_(block.attention.qkv, -bound, bound)
            nn.init.uniform_(block.up, -bound, bound)
            nn.init.zeros_(block.attention.proj)
            nn.init.zeros_(block.down)
            block.stream_mix.copy_(torch.tensor([1.0, 0.0]))
            block.attention.value_mix.copy_(torch.tensor([0.5, 0.5]))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        dtype = compute_dtype(tokens.device, self.head.weight.dtype)
        x = rms_norm(self.token_embedding(tokens).to(dtype))
        x = torch.cat([x[:, :1], x[:, 1:] + self.smear.to(dtype) * x[:, :-1]], dim=1)
        x0, first = x, None
        rotary = rotary_table(tokens.shape[1], self.config.n_embd // self.config.n_head, tokens.device).to(dtype)
        for block in self.blocks:
            x, first = block(x, x0, rotary, first)
        logits = self.head(rms_norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
