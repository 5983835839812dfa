"""A modern decoder: GPT-2 with later changes that make small models learn faster.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.

There are no biases, and norms have no gains.

Sources: Jordan et al. 2024, "modded-nanogpt", and Karpathy 2025, "nanochat", for the combination of
these changes. The docstrings of classes and functions name the source of each change.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.keys.model_config import ModernConfig, PartConfig
from mingpt_ddp.models.block_parts import (
    block_spec,
    decodes_in_graph,
    decodes_with_cache,
    init_user_weights,
    new_caches,
    user_part,
)
from mingpt_ddp.models.kv_cache import CachePosition, select_positions
from mingpt_ddp.models.ngrams import HISTORY_LENGTH, NGramEmbedding
from mingpt_ddp.models.ops import (
    compute_dtype,
    cross_entropy,
    dropout,
    norm_and_shift,
    rms_norm,
)
from mingpt_ddp.models.rotary import RotaryAttention, rotary_table

# Parameters that start at zero, by the ends of their names: the weights of layers that write to the
# residual stream, and learned fractions.
INITIALLY_ZERO = (
    "proj.weight",
    "down.weight",
    "head.weight",
    "table.weight",
    "share",
    "stream_mix",
)


@dataclass
class LayerCache:
    """Decoding state of one block."""

    attention: Any  # a KVCache, or the cache of a user's attention
    last_1: Tensor  # newest normalized input of `smear_1`, (B, 1, C)
    last_2: Tensor  # newest normalized input of `smear_2`, (B, 1, C)


@dataclass
class Cache:
    """Decoding state of the model after the tokens so far."""

    layers: list[LayerCache]  # one for each block
    last: Tensor  # normalized embedding of the newest token for the first smear, (B, 1, C)
    rotary: Tensor  # `rotary_table` of all positions
    ngrams: Tensor  # ids of the newest tokens, (B, HISTORY_LENGTH)


class Smear(nn.Module):
    """Normalize each vector, then add a learned fraction of the previous token's vector to it.

    Each channel has a fraction of its own.

    Source: the token shift of Peng et al. 2023, "RWKV" (arXiv:2305.13048).
    """

    def __init__(self, n_embd: int, norm: nn.Module | None) -> None:
        """
        Args:
            norm: A user's norm. None for RMSNorm.
        """
        super().__init__()
        self.norm = norm
        self.share = nn.Parameter(torch.empty(n_embd))

    def forward(self, x: Tensor, last: Tensor | None, start: CachePosition) -> Tensor:
        """
        Args:
            x: Vectors of the positions from `start` on, (B, T, C).
            last: The normalized vector before x, (B, 1, C), ignored if `start` is 0. It is
                overwritten with the last normalized vector of x. None in training.
        """
        if last is None and self.norm is None:
            return norm_and_shift(x, self.share)

        x = rms_norm(x) if self.norm is None else self.norm(x)
        is_first = isinstance(start, int) and start == 0
        if last is None or is_first:
            previous = F.pad(x, (0, 0, 1, -1))  # zeros before the first token
        elif x.shape[1] == 1:
            previous = last
        else:
            previous = torch.cat([last, x[:, :-1]], dim=1)

        y = torch.addcmul(x, previous, self.share.to(x.dtype))
        if last is not None:
            last.copy_(x[:, -1:])
        return y


class Block(nn.Module):
    """Attention, then an MLP four times as wide. Both add their outputs to the residual stream."""

    def __init__(self, config: ModernConfig, block_size: int, layer: int) -> None:
        super().__init__()
        spec = block_spec(config, block_size, layer)
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.empty(config.n_embd))  # fraction of x0 to add
        self.smear_1 = Smear(config.n_embd, user_part("norm", config, spec))
        self.smear_2 = Smear(config.n_embd, user_part("norm", config, spec))
        self.attention = user_part("attention", config, spec) or RotaryAttention(PartConfig(), spec)
        self.takes_rotary = getattr(self.attention, "rotary", False)
        self.mlp = user_part("mlp", config, spec)
        if self.mlp is None:
            self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
            self.activation = spec.activation
            self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        rotary: Tensor,
        v1: Tensor | None,
        cache: LayerCache | None,
        start: CachePosition,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: The residual stream, (B, T, C).
            x0: The residual stream before the first block, (B, T, C).
            rotary: The result of `rotary_table` for these positions, (T, 2, 1, 1, D).
            v1: The attention values of the first block, (B, H, T, D). None in that block itself.

        Returns:
            The residual stream, and the attention values of the first block.
        """
        x = torch.addcmul(x, self.stream_mix.to(x.dtype), x0)

        y = self.smear_1(x, cache.last_1 if cache else None, start)
        if self.takes_rotary:
            y, v1 = self.attention(y, rotary, v1, cache.attention if cache else None, start)
        else:
            y = self.attention(y, cache.attention, start) if cache else self.attention(y)
        x = x + dropout(y, self.dropout, self.training)

        y = self.smear_2(x, cache.last_2 if cache else None, start)
        if self.mlp is None:
            y = self.up(y)  # (B, T, 4C)
            y = self.down(self.activation(y))  # (B, T, C)
        else:
            y = self.mlp(y)
        x = x + dropout(y, self.dropout, self.training)
        return x, v1


class Modern(nn.Module):
    """The whole model, from token ids to logits or the loss."""

    def __init__(self, config: ModernConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.ngrams = None
        if config.ngram_rows:
            self.ngrams = NGramEmbedding(config.ngram_rows, config.n_embd)
        last = block_spec(config, block_size, config.n_layer)
        self.smear = Smear(config.n_embd, user_part("norm", config, last))
        self.blocks = nn.ModuleList(Block(config, block_size, i) for i in range(config.n_layer))
        self.norm = user_part("norm", config, last)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.has_cache = decodes_with_cache(config)
        self.has_graph_step = decodes_in_graph(config)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Zero the layers that write to the residual stream, so that each block starts as identity.

        The weights of other linear layers are uniform with a standard deviation of 1 / sqrt(number
        of inputs). All other parameters of a user's part come from its constructor or, if it has
        one, from its method `init_weights`.
        """
        nn.init.normal_(self.token_embedding.weight)
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        weights = {layer.weight for layer in linear}
        for name, parameter in self.named_parameters():
            if name.endswith(INITIALLY_ZERO):
                nn.init.zeros_(parameter)
            elif parameter in weights:
                bound = (3 / parameter.shape[1]) ** 0.5
                nn.init.uniform_(parameter, -bound, bound)
            elif name.endswith("value_mix"):
                nn.init.ones_(parameter)
        for layer in linear:
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.apply(init_user_weights)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if targets are given.

        Args:
            tokens: Token ids below V, (B, T) with T <= block_size.
            targets: The next token after each token, (B, T).

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per token, a scalar.
        """
        x = self._hidden(tokens)
        logits = self.head(x)
        if targets is None:
            return logits
        return cross_entropy(logits, targets)

    def _hidden(
        self, tokens: Tensor, cache: Cache | None = None, start: CachePosition = 0
    ) -> Tensor:
        """Return the normalized output of the last block, (B, T, C)."""
        T = tokens.shape[1]
        if isinstance(start, int) and start + T > self.block_size:
            raise ValueError(f"{start + T} tokens exceed the context length of {self.block_size}")

        x = self.token_embedding(tokens)  # (B, T, C)
        if self.ngrams is not None:
            x = x + self.ngrams(tokens, cache.ngrams if cache else None, start)
        x = x.to(compute_dtype(self.head.weight))
        x0 = self.smear(x, cache.last if cache else None, start)

        if cache is None:
            head_size = self.config.n_embd // self.config.n_head
            rotary = rotary_table(T, head_size, x.device, x.dtype)
        else:
            rotary = select_positions(cache.rotary, start, T)

        x = x0
        v1 = None
        for i, block in enumerate(self.blocks):
            x, v1 = block(x, x0, rotary, v1, cache.layers[i] if cache else None, start)
        return rms_norm(x) if self.norm is None else self.norm(x)

    def new_cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """Allocate a cache for `batch` sequences."""
        C = self.config.n_embd
        D = C // self.config.n_head
        device = self.head.weight.device

        def new_last() -> Tensor:
            return torch.zeros(batch, 1, C, dtype=dtype, device=device)

        layers = []
        for cache in new_caches(self.blocks, batch, self.block_size, dtype):
            layers.append(LayerCache(cache, new_last(), new_last()))
        rotary = rotary_table(self.block_size, D, device, dtype)
        ngrams = torch.zeros(batch, HISTORY_LENGTH, dtype=torch.int64, device=device)
        return Cache(layers, new_last(), rotary, ngrams)

    def decode(self, tokens: Tensor, cache: Cache, start: CachePosition) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        Args:
            start: Number of cached positions before the new tokens.
        """
        x = self._hidden(tokens, cache, start)
        return self.head(x[:, -1])

    def step(self, tokens: Tensor, cache: Cache, position: Tensor) -> Tensor:
        """Return the logits (B, V) after one new token per sequence (B,).

        Args:
            position: Number of cached tokens, a tensor of shape () on the device.
        """
        return self.decode(tokens[:, None], cache, position)

    def flops_per_token(self) -> int:
        """Count the operations of a forward and backward pass per token, as `GPT` counts them."""
        c = self.config
        n = sum(p.numel() for p in self.blocks.parameters() if p.dim() > 1)
        n += self.head.weight.numel()
        attention = 12 * c.n_layer * c.n_embd * self.block_size
        return 6 * n + attention
