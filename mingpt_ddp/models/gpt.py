"""GPT-2: a pre-norm decoder with learned positions. The head shares the embedding's weight.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and its code.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.keys.model_config import GPTConfig, PartConfig
from mingpt_ddp.models.block_parts import (
    Attention,
    BlockSpec,
    block_spec,
    decodes_in_graph,
    decodes_with_cache,
    init_user_weights,
    new_caches,
    user_part,
)
from mingpt_ddp.models.kv_cache import CachePosition, select_positions
from mingpt_ddp.models.ops import cross_entropy, dropout


class Block(nn.Module):
    """Attention, then an MLP four times as wide. Both add their outputs to the residual stream."""

    def __init__(self, config: GPTConfig, block_size: int, layer: int) -> None:
        super().__init__()
        spec = block_spec(config, block_size, layer, config.bias)
        self.dropout = config.dropout
        self.norm_1 = _norm(config, spec)
        self.attention = user_part("attention", config, spec) or Attention(PartConfig(), spec)
        self.norm_2 = _norm(config, spec)
        self.mlp = user_part("mlp", config, spec)
        if self.mlp is None:
            self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
            self.activation = spec.activation
            self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: Any = None, start: CachePosition = 0) -> Tensor:
        y = self.norm_1(x)
        y = self.attention(y) if cache is None else self.attention(y, cache, start)
        x = x + dropout(y, self.dropout, self.training)

        y = self.norm_2(x)
        if self.mlp is None:
            y = self.up(y)  # (B, T, 4C)
            y = self.down(self.activation(y))  # (B, T, C)
        else:
            y = self.mlp(y)
        return x + dropout(y, self.dropout, self.training)


def _norm(config: GPTConfig, spec: BlockSpec) -> nn.Module:
    return user_part("norm", config, spec) or nn.LayerNorm(config.n_embd, bias=config.bias)


class GPT(nn.Module):
    """The whole model, from token ids to logits or the loss."""

    def __init__(self, config: GPTConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)  # also used as the head
        self.position_embedding = nn.Embedding(block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, block_size, i) for i in range(config.n_layer))
        self.norm = _norm(config, block_spec(config, block_size, config.n_layer, config.bias))
        self.has_cache = decodes_with_cache(config)
        self.has_graph_step = decodes_in_graph(config)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights from N(0, 0.02), and smaller ones if a layer writes to the residual stream.

        `apply` visits a module after its children. Therefore the weights of `proj` and `down` are
        drawn twice, and the `init_weights` of a user's part replaces the weights of its layers.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name in ("proj", "down"):
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=residual_std)
        init_user_weights(module)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if targets are given.

        Args:
            tokens: Token ids below V, (B, T) with T <= block_size.
            targets: The next token after each token, (B, T).

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per token, a scalar.
        """
        x = self._hidden(tokens)
        logits = F.linear(x, self.token_embedding.weight)
        if targets is None:
            return logits
        return cross_entropy(logits, targets)

    def _hidden(
        self, tokens: Tensor, cache: list[Any] | None = None, start: CachePosition = 0
    ) -> Tensor:
        """Return the normalized output of the last block, (B, T, C)."""
        T = tokens.shape[1]
        if isinstance(start, int) and start + T > self.block_size:
            raise ValueError(f"{start + T} tokens exceed the context length of {self.block_size}")

        token_vectors = self.token_embedding(tokens)  # (B, T, C)
        position_vectors = select_positions(self.position_embedding.weight, start, T)  # (T, C)
        x = dropout(token_vectors + position_vectors, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, cache[i] if cache else None, start)
        return self.norm(x)

    def new_cache(self, batch: int, dtype: torch.dtype) -> list[Any]:
        """Allocate a cache for `batch` sequences, with one entry for each block."""
        return new_caches(self.blocks, batch, self.block_size, dtype)

    def decode(self, tokens: Tensor, cache: list[Any], start: CachePosition) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        Args:
            start: Number of cached positions before the new tokens.
        """
        x = self._hidden(tokens, cache, start)
        return F.linear(x[:, -1], self.token_embedding.weight)

    def step(self, tokens: Tensor, cache: list[Any], position: Tensor) -> Tensor:
        """Return the logits (B, V) after one new token per sequence (B,).

        Args:
            position: Number of cached tokens, a tensor of shape () on the device.
        """
        return self.decode(tokens[:, None], cache, position)

    def flops_per_token(self) -> int:
        """Count the operations of a forward and backward pass per token: 6 N + 12 L C T.

        N counts every weight that is used in a matrix product, including the tied head. The formula
        counts full attention, as is the convention for MFU.

        Source: Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B.
        """
        n = sum(parameter.numel() for parameter in self.parameters())
        n -= self.position_embedding.weight.numel()
        attention = 12 * self.config.n_layer * self.config.n_embd * self.block_size
        return 6 * n + attention
