"""A modern decoder: changes since GPT-2 that make small models learn faster, each with its source.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.

Combined as in Jordan et al. 2024, "modded-nanogpt", and Karpathy 2025, "nanochat". There are no
biases, and norms have no gains.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.components import ModernConfig
from mingpt_ddp.models.kv_cache import CachePosition, KVCache, attend, select_positions
from mingpt_ddp.models.ngrams import HISTORY, NGramEmbedding
from mingpt_ddp.models.ops import (
    compute_dtype,
    cross_entropy,
    dropout,
    norm_and_rotate,
    norm_and_shift,
    relu_squared,
    rms_norm,
)


@dataclass
class LayerCache:
    """Decoding state of one block."""

    kv: KVCache
    last_1: Tensor  # (B, 1, C) the newest input of `smear_1`
    last_2: Tensor  # (B, 1, C) the newest input of `smear_2`


@dataclass
class Cache:
    """Decoding state of the tokens so far."""

    layers: list[LayerCache]  # by block
    last: Tensor  # (B, 1, C) embedding of the newest token, for the first smear
    rotary: Tensor  # `rotary_table` of all positions
    ngrams: Tensor  # (B, HISTORY) ids of the newest tokens


class FusedLinear(nn.Linear):
    """A linear layer without bias whose weight is several matrices, concatenated by rows."""

    def __init__(self, inputs: int, outputs: int, parts: int) -> None:
        """
        Args:
            outputs: rows of each matrix.
            parts: number of matrices; Muon orthogonalizes each by itself.
        """
        super().__init__(inputs, parts * outputs, bias=False)
        self.parts = parts


class Smear(nn.Module):
    """Normalize, then add a learned fraction of the previous token's vector, per channel.

    Source: the token shift of Peng et al. 2023, "RWKV" (arXiv:2305.13048).
    """

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(n_embd))

    def forward(self, x: Tensor, last: Tensor | None, start: CachePosition) -> Tensor:
        """
        Args:
            x: (B, T, C).
            last: (B, 1, C) the normalized vector before x, ignored if `start` is 0; overwritten
                with that of x.
        """
        if last is None:
            return norm_and_shift(x, self.share)

        x = rms_norm(x)
        is_first = isinstance(start, int) and start == 0
        if is_first:
            previous = F.pad(x[:, :-1], (0, 0, 1, 0))  # zeros before the first token
        elif x.shape[1] == 1:
            previous = last
        else:
            previous = torch.cat([last, x[:, :-1]], dim=1)

        y = torch.addcmul(x, previous, self.share.to(x.dtype))
        last.copy_(x[:, -1:])
        return y


class Attention(nn.Module):
    """Causal self-attention with rotary positions, normalized queries and keys, mixed values.

    Each block adds the values of the first block to its own, by a learned fraction.

    Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Henry et al. 2020, "Query-Key
    Normalization" (arXiv:2010.04245); Zhou et al. 2024, "Value Residual Learning"
    (arXiv:2410.17897).
    """

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = FusedLinear(config.n_embd, config.n_embd, parts=3)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_mix = nn.Parameter(torch.empty(config.n_embd))

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        v1: Tensor | None,
        cache: KVCache | None,
        start: CachePosition,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, T, C).
            rotary: (T, 2, 1, 1, D), see `rotary_table`.
            v1: (B, H, T, D) the values of the first block; None in that block.

        Returns:
            (B, T, C) for the residual stream, and the values of the first block.
        """
        B, T, C = x.shape
        qkv = self.qkv(x)  # (B, T, 3C)
        qk, v = qkv.split([2 * C, C], dim=-1)
        qk = qk.unflatten(-1, (2, self.n_head, -1))  # (B, T, 2, H, D)
        v = v.unflatten(-1, (self.n_head, -1))  # (B, T, H, D)

        qk = norm_and_rotate(qk, rotary)  # (B, T, 2, H, D)
        q, k = (part.transpose(1, 2) for part in qk.unbind(2))  # each (B, H, T, D)
        v = v.transpose(1, 2)
        if v1 is None:
            v1 = v
        value_mix = self.value_mix.view(self.n_head, 1, -1)  # (H, 1, D)
        v = torch.addcmul(v, value_mix.to(v.dtype), v1)

        weight_dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, weight_dropout, cache, start)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.proj(y), v1


def rotary_table(T: int, D: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return (T, 2, 1, 1, D): the cosine and the sine of each position's angles.

    The sine has the signs that `norm_and_rotate` needs.
    """
    frequencies = 10_000.0 ** (-2 * torch.arange(D // 2, device=device) / D)
    positions = torch.arange(T, device=device)
    angles = torch.outer(positions, frequencies)  # (T, D / 2)
    cos = angles.cos()
    sin = angles.sin()
    cos = torch.cat([cos, cos], dim=-1)  # (T, D)
    sin = torch.cat([-sin, sin], dim=-1)
    table = torch.stack([cos, sin], dim=1)
    return table[:, :, None, None].to(dtype)


class Block(nn.Module):
    """Attention, then an MLP four times as wide; each adds to the residual stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.empty(config.n_embd))  # fraction of x0 to add
        self.smear_1 = Smear(config.n_embd)
        self.smear_2 = Smear(config.n_embd)
        self.attention = Attention(config)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        rotary: Tensor,
        v1: Tensor | None,
        cache: LayerCache | None,
        start: CachePosition,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, T, C) the residual stream.
            x0: (B, T, C) its first value, the embedding.
            rotary: (T, 2, 1, 1, D), see `rotary_table`.
            v1: (B, H, T, D) the values of the first block; None in that block.

        Returns:
            The residual stream, and the values of the first block.
        """
        x = torch.addcmul(x, self.stream_mix.to(x.dtype), x0)

        y = self.smear_1(x, cache.last_1 if cache else None, start)
        y, v1 = self.attention(y, rotary, v1, cache.kv if cache else None, start)
        x = x + dropout(y, self.dropout, self.training)

        y = self.smear_2(x, cache.last_2 if cache else None, start)
        y = self.up(y)  # (B, T, 4C)
        y = self.down(relu_squared(y))  # (B, T, C)
        x = x + dropout(y, self.dropout, self.training)
        return x, v1


class Modern(nn.Module):
    """Token ids in, logits (or the loss) out."""

    def __init__(self, config: ModernConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.ngrams = None
        if config.ngram_rows:
            self.ngrams = NGramEmbedding(config.ngram_rows, config.n_embd)
        self.smear = Smear(config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Zero all layers that write to the residual stream: each block starts as the identity."""
        nn.init.normal_(self.token_embedding.weight)
        bound = (3 / self.config.n_embd) ** 0.5  # uniform with standard deviation 1 / sqrt(C)
        for name, parameter in self.named_parameters():
            if name.endswith(("qkv.weight", "up.weight")):
                nn.init.uniform_(parameter, -bound, bound)
            elif name.endswith("value_mix"):
                nn.init.ones_(parameter)
            elif name != "token_embedding.weight":
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss if targets are given.

        Args:
            tokens: (B, T) integers below V, T <= block_size.
            targets: (B, T) the token that follows each of them.

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
        """Return (B, T, C), the normalized output of the last block."""
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
        return rms_norm(x)

    def new_cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """Allocate a cache for `batch` sequences."""
        C = self.config.n_embd
        D = C // self.config.n_head
        kv_shape = (batch, self.config.n_head, self.block_size, D)
        device = self.head.weight.device

        def new_last() -> Tensor:
            return torch.zeros(batch, 1, C, dtype=dtype, device=device)

        layers = []
        for _ in self.blocks:
            kv = KVCache(kv_shape, dtype, device)
            layers.append(LayerCache(kv, new_last(), new_last()))
        rotary = rotary_table(self.block_size, D, device, dtype)
        ngrams = torch.zeros(batch, HISTORY, dtype=torch.int64, device=device)
        return Cache(layers, new_last(), rotary, ngrams)

    def decode(self, tokens: Tensor, cache: Cache, start: CachePosition) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        They follow `start` cached positions.
        """
        x = self._hidden(tokens, cache, start)
        return self.head(x[:, -1])

    def step(self, tokens: Tensor, cache: Cache, position: Tensor) -> Tensor:
        """Decode one new token per sequence (B,).

        Args:
            position: number of cached tokens, a tensor of shape () on the device.
        """
        return self.decode(tokens[:, None], cache, position)

    def flops_per_token(self) -> int:
        """Count the operations of a forward and backward pass per token, as GPT does."""
        c = self.config
        n = 12 * c.n_layer * c.n_embd**2 + self.head.weight.numel()
        attention = 12 * c.n_layer * c.n_embd * self.block_size
        return 6 * n + attention
