"""GPT-2: a pre-norm decoder with learned positions and tied embedding and head.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and its code.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.components import GPTConfig
from mingpt_ddp.models.kv_cache import CachePosition, KVCache, attend, select_positions
from mingpt_ddp.models.ops import cross_entropy, dropout


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head  # tensor parallelism lowers it to the heads of this rank
        self.head_size = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, start: CachePosition = 0) -> Tensor:
        qkv = self.qkv(x)  # (B, T, 3C)
        qkv = qkv.unflatten(-1, (3, self.n_head, self.head_size))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, H, T, D)

        weight_dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, weight_dropout, cache, start)  # (B, H, T, D)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C): the heads side by side

        y = self.proj(y)
        return dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Attention, then an MLP four times as wide; each adds to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.norm_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, start: CachePosition = 0) -> Tensor:
        x = x + self.attention(self.norm_1(x), cache, start)

        y = self.up(self.norm_2(x))  # (B, T, 4C)
        y = F.gelu(y, approximate=self.approximate)
        y = self.down(y)  # (B, T, C)
        return x + dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Token ids in, logits (or the loss) out."""

    def __init__(self, config: GPTConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)  # also the head's weight
        self.position_embedding = nn.Embedding(block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights from N(0, 0.02); smaller ones where a layer writes to the residual stream.

        `apply` visits a module after its children, so proj and down are drawn twice.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        if isinstance(module, Attention):
            nn.init.normal_(module.proj.weight, std=residual_std)
        if isinstance(module, Block):
            nn.init.normal_(module.down.weight, std=residual_std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if targets are given.

        Args:
            tokens: (B, T) integers below V, T <= block_size.
            targets: (B, T) the token that follows each of them.

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per token, a scalar.
        """
        x = self._hidden(tokens)
        logits = F.linear(x, self.token_embedding.weight)
        if targets is None:
            return logits
        return cross_entropy(logits, targets)

    def _hidden(
        self, tokens: Tensor, cache: list[KVCache] | None = None, start: CachePosition = 0
    ) -> Tensor:
        """Return (B, T, C), the normalized output of the last block."""
        T = tokens.shape[1]
        if isinstance(start, int) and start + T > self.block_size:
            raise ValueError(f"{start + T} tokens exceed the context length of {self.block_size}")

        token_vectors = self.token_embedding(tokens)  # (B, T, C)
        position_vectors = select_positions(self.position_embedding.weight, start, T)  # (T, C)
        x = dropout(token_vectors + position_vectors, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, cache[i] if cache else None, start)
        return self.norm(x)

    def new_cache(self, batch: int, dtype: torch.dtype) -> list[KVCache]:
        """Allocate a KV cache for `batch` sequences, one entry per block."""
        cache = []
        for block in self.blocks:
            attention = cast(Block, block).attention
            shape = (batch, attention.n_head, self.block_size, attention.head_size)
            cache.append(KVCache(shape, dtype, self.token_embedding.weight.device))
        return cache

    def decode(self, tokens: Tensor, cache: list[KVCache], start: CachePosition) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        They follow `start` cached positions.
        """
        x = self._hidden(tokens, cache, start)
        return F.linear(x[:, -1], self.token_embedding.weight)

    def step(self, tokens: Tensor, cache: list[KVCache], position: Tensor) -> Tensor:
        """Decode one new token per sequence (B,).

        Args:
            position: number of cached tokens, a tensor of shape () on the device.
        """
        return self.decode(tokens[:, None], cache, position)

    def flops_per_token(self) -> int:
        """Count the operations of a forward and backward pass per token: 6 N + 12 L C T.

        N counts every weight used in a product, including the tied head. Source: Chowdhery et al.
        2022, "PaLM" (arXiv:2204.02311), appendix B, with full attention, the convention for MFU.
        """
        n = sum(parameter.numel() for parameter in self.parameters())
        n -= self.position_embedding.weight.numel()
        attention = 12 * self.config.n_layer * self.config.n_embd * self.block_size
        return 6 * n + attention
