"""A decoder of today: what has made small models learn faster since GPT-2, each part with its source.

Shapes: B sequences, T characters, C = n_embd, H = n_head heads of D = C / H, V = vocab_size.
The parts were brought together by Jordan et al. 2024, "modded-nanogpt", and Karpathy 2025, "nanochat". There are no
biases, and norms have no gains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.schema import ModernConfig
from mingpt_ddp.models.kv_cache import CachePosition, KVCache, rows
from mingpt_ddp.models.ops import causal_attention, compute_dtype, dropout, relu_squared, rms_norm


class Stacked(nn.Linear):
    """Several linear layers in one, their matrices one below another: an optimizer of matrices sees each by itself."""

    def __init__(self, n_embd: int, parts: int) -> None:
        super().__init__(n_embd, parts * n_embd, bias=False)
        self.parts = parts


class Smear(nn.Module):
    """Add to each character's vector a learned share of the one before.

    Source: the token shift of Peng et al. 2023, "RWKV" (arXiv:2305.13048).
    """

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(n_embd))

    def forward(self, x: Tensor, last: Tensor | None, start: CachePosition) -> Tensor:
        """
        Args:
            x: (B, T, C).
            last: (B, 1, C) the vector before the first of them, unless `start` is 0; the last of them afterwards.
        """
        if last is None or (isinstance(start, int) and start == 0):
            before = F.pad(x[:, :-1], (0, 0, 1, 0))
        else:
            before = last if x.shape[1] == 1 else torch.cat([last, x[:, :-1]], dim=1)
        y = torch.addcmul(x, before, self.share.to(x.dtype))
        if last is not None:
            last.copy_(x[:, -1:])
        return y


class LayerCache(KVCache):
    """What a block keeps of the characters that it has read."""

    def __init__(
        self, batch: int, config: ModernConfig, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__((batch, config.n_head, block_size, config.n_embd // config.n_head), dtype, device)
        self.last = torch.zeros(2, batch, 1, config.n_embd, dtype=dtype, device=device)  # of what the smears have seen


class Attention(nn.Module):
    """Causal self-attention with rotary positions, normalised queries and keys, and the first block's values mixed in.

    Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Henry et al. 2020, "Query-Key Normalization"
    (arXiv:2010.04245); Zhou et al. 2024, "Value Residual Learning" (arXiv:2410.17897).
    """

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = Stacked(config.n_embd, 3)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_mix = nn.Parameter(torch.empty(config.n_embd))

    def forward(
        self, x: Tensor, rotary: Tensor, first: Tensor | None, cache: LayerCache | None, start: CachePosition
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, T, C).
            rotary: what `rotate` wants.
            first: (B, H, T, D) the values of the first block; None in that block.

        Returns:
            (B, T, C) for the residual stream, and the values of the first block.
        """
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        qk, v = qkv.split([2, 1], dim=2)
        q, k = rotate(rms_norm(qk), rotary).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        v = v[:, :, 0].transpose(1, 2)
        first = v if first is None else first
        v = torch.addcmul(v, self.value_mix.view(self.n_head, 1, -1).to(v.dtype), first)
        if cache is not None:
            y = cache.attend(q, k, v, start)
        else:
            y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), first


def rotary_table(T: int, D: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(T, 2, 1, 1, D): the cosine of each position's angles, and its sine with the sign that `rotate` wants."""
    frequencies = 10_000.0 ** (-2 * torch.arange(D // 2, device=device) / D)
    angles = torch.outer(torch.arange(T, device=device), frequencies)  # (T, D / 2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)
    return table[:, :, None, None].to(dtype)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair of numbers (i, i + D / 2) by the angle of its position.

    Args:
        x: (B, T, 2, H, D)
        rotary: (T, 2, 1, 1, D) the rows of `rotary_table` for these positions.
    """
    cos, sin = rotary.unbind(1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Block(nn.Module):
    """Attention, then a feed-forward layer four times as wide, each added to the residual stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.empty(config.n_embd))  # how much of the embedding comes in anew
        self.smear_1, self.smear_2 = Smear(config.n_embd), Smear(config.n_embd)
        self.attention = Attention(config)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        rotary: Tensor,
        first: Tensor | None,
        cache: LayerCache | None = None,
        start: CachePosition = 0,
    ) -> tuple[Tensor, Tensor]:
        x = torch.addcmul(x, self.stream_mix.to(x.dtype), x0)
        last_1, last_2 = (None, None) if cache is None else cache.last.unbind()
        y, first = self.attention(self.smear_1(rms_norm(x), last_1, start), rotary, first, cache, start)
        x = x + dropout(y, self.dropout, self.training)
        y = self.down(relu_squared(self.up(self.smear_2(rms_norm(x), last_2, start))))
        return x + dropout(y, self.dropout, self.training), first


class Cache:
    """What the model keeps of the characters that it has read."""

    def __init__(self, layers: list[LayerCache], last: Tensor, rotary: Tensor) -> None:
        self.layers = layers
        self.last = last  # (B, 1, C) the embedding of the newest character, for the smear
        self.rotary = rotary  # of all positions


class Modern(nn.Module):
    """Characters in, scores of the next character (or the loss) out."""

    def __init__(self, config: ModernConfig, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocab_size, config.n_embd)
        self.smear = Smear(config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """What writes to the residual stream begins at zero, so that each block begins as the identity."""
        nn.init.normal_(self.token_embedding.weight)
        bound = (3 / self.config.n_embd) ** 0.5  # of a uniform distribution with deviation 1 / sqrt(C)
        for name, parameter in self.named_parameters():
            if name.endswith(("qkv.weight", "up.weight")):
                nn.init.uniform_(parameter, -bound, bound)
            elif name.endswith("value_mix"):
                nn.init.ones_(parameter)
            elif name != "token_embedding.weight":
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Scores, or the loss where targets are given.

        Args:
            tokens: (B, T) integers below V, T <= block_size.
            targets: (B, T) the character that follows each of them.

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per character, a scalar.
        """
        logits: Tensor = self.head(self._hidden(tokens))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _hidden(self, tokens: Tensor, cache: Cache | None = None, start: CachePosition = 0) -> Tensor:
        """(B, T, C) behind the last block, normalised."""
        T, D = tokens.shape[1], self.config.n_embd // self.config.n_head
        if isinstance(start, int) and start + T > self.block_size:
            raise ValueError(f"{start + T} characters are more than the context of {self.block_size}")
        x = rms_norm(self.token_embedding(tokens).to(compute_dtype(self.head.weight)))
        x = x0 = self.smear(x, cache.last if cache else None, start)
        rotary = rotary_table(T, D, x.device, x.dtype) if cache is None else rows(cache.rotary, start, T)
        first = None
        for i, block in enumerate(self.blocks):
            x, first = block(x, x0, rotary, first, cache.layers[i] if cache else None, start)
        return rms_norm(x)

    def new_cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """Room for what is kept of `batch` sequences."""
        c, device = self.config, self.head.weight.device
        D = c.n_embd // c.n_head
        layers = [LayerCache(batch, c, self.block_size, dtype, device) for _ in range(c.n_layer)]
        last = torch.zeros(batch, 1, c.n_embd, dtype=dtype, device=device)
        return Cache(layers, last, rotary_table(self.block_size, D, device, dtype))

    def decode(self, tokens: Tensor, cache: Cache, start: CachePosition) -> Tensor:
        """Logits (B, V) behind the last of the new `tokens` (B, T), which follow `start` cached positions."""
        logits: Tensor = self.head(self._hidden(tokens, cache, start)[:, -1])
        return logits

    def step(self, tokens: Tensor, cache: Cache, position: Tensor) -> Tensor:
        """Logits (B, V) behind the new `tokens` (B,) at a position that only the device knows, a tensor of shape ()."""
        return self.decode(tokens[:, None], cache, position)

    def flops_per_token(self) -> int:
        """Floating-point operations of a forward and backward per character: 6 N + 12 L C T, counted as GPT's are."""
        c = self.config
        return (
            6 * (12 * c.n_layer * c.n_embd**2 + self.head.weight.numel()) + 12 * c.n_layer * c.n_embd * self.block_size
        )
