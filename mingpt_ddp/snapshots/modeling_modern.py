"""The architecture `modern` of mingpt_ddp for transformers.

An export copies this file, which imports nothing of ours.

Shapes: B sequences, T tokens, S >= T tokens with those in the cache, C = n_embd, H = n_head heads
of D = C / H. A sequence may have padding at either end: no token sees it, and positions count
without it.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Cache:
    """Keys and values of every block and the last inputs of every smear, by name."""

    def __init__(self, skipped: Tensor | int = 0) -> None:
        """
        Args:
            skipped: (B,) tokens at the begin of each text that the model no longer sees.
        """
        self.skipped = skipped
        self.tensors = dict[str, Tensor]()
        self.mask: Tensor | None = None  # (B, S) true where a token is not padding

    def extend(self, name: str, x: Tensor, keep: int | None = None) -> Tensor:
        """Return the cached tensor with x appended along the last dimension but one.

        Args:
            keep: how many of the last entries to cache; None: all.
        """
        if name in self.tensors:
            x = torch.cat([self.tensors[name], x], dim=-2)
        self.tensors[name] = x if keep is None else x[..., -keep:, :]
        return x

    def extend_mask(self, mask: Tensor | None, tokens: Tensor) -> Tensor:
        """Return the mask of cached and new tokens: the caller's, or else all new ones count.

        Args:
            tokens: (B, T) the new ones.
        """
        if mask is None:
            new = torch.ones_like(tokens, dtype=torch.bool)
            mask = new if self.mask is None else torch.cat([self.mask, new], dim=1)
        self.mask = mask.bool()
        return self.mask

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return 0 if self.mask is None else self.mask.shape[1]

    def reorder_cache(self, rows: Tensor) -> None:
        """Select the sequences that beam search continues."""
        self.tensors = {name: x.index_select(0, rows) for name, x in self.tensors.items()}
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows)
        if isinstance(self.skipped, Tensor):
            self.skipped = self.skipped.index_select(0, rows)


class View(NamedTuple):
    """What the new tokens are and see."""

    positions: Tensor  # (B, T)
    is_token: Tensor  # (B, T, 1): 0 for padding, else 1
    visible: Tensor  # (B, 1, T, S)


class ModernConfig(PretrainedConfig):
    """vocab_size, block_size (context length), n_layer, n_head, n_embd, dropout, ngram_rows."""

    model_type = "mingpt_modern"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (math.sqrt(x.shape[-1]) / norm.clamp_min(1e-6)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair of elements (i, i + D / 2) of x (B, H, T, D) by the angle of its position.

    Args:
        positions: (B, T).
    """
    D = x.shape[-1]
    frequencies = 10_000.0 ** (-2 * torch.arange(D // 2, device=x.device) / D)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)  # (B, 1, T, D)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Smear(nn.Module):
    """Add a learned fraction of the previous token's vector to each token's, per channel."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x: Tensor, view: View, cache: Cache, name: str) -> Tensor:
        before = cache.extend(name, x * view.is_token.to(x.dtype), keep=1)[:, :-1]
        return x + self.share * F.pad(before, (0, 0, x.shape[1] - before.shape[1], 0))


class NGramEmbedding(nn.Module):
    """A vector of C / 4 for each of the 2, 3, 4 and 5 newest tokens, by a hash of their ids."""

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, n_embd // 4)

    def forward(self, tokens: Tensor, view: View, cache: Cache) -> Tensor:
        ids = (tokens + 1)[..., None] * view.is_token  # 0 is before the text
        known = cache.extend("ngrams", ids, keep=4)  # (B, up to 4 + T, 1)
        T = tokens.shape[1]
        known = F.pad(known, (0, 0, 4 + T - known.shape[1], 0))[..., 0]
        hashed = known[:, 4:]
        rows = []
        for n in (2, 3, 4, 5):
            hashed = (hashed * 1_103_515_245 + known[:, 5 - n : 5 - n + T]) % ((1 << 31) - 1)
            rows.append(hashed % self.table.num_embeddings)
        return self.table(torch.stack(rows, dim=-1)).flatten(2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys.

    The first block's values are added to those of the others.
    """

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_mix = nn.Parameter(torch.ones(config.n_embd))

    def forward(
        self, x: Tensor, v1: Tensor | None, view: View, cache: Cache, name: str
    ) -> tuple[Tensor, Tensor]:
        B, T, C = x.shape
        # each (B, H, T, D)
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q = rotate(rms_norm(q), view.positions)
        k = rotate(rms_norm(k), view.positions)
        v1 = v if v1 is None else v1
        v = v + self.value_mix.view(self.n_head, 1, -1) * v1
        # (B, H, S, D)
        k = cache.extend(f"{name}.keys", k)
        v = cache.extend(f"{name}.values", v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=view.visible, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), v1


class Block(nn.Module):
    """Attention, then an MLP four times as wide; each adds to the residual stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.zeros(config.n_embd))
        self.smear_1 = Smear(config.n_embd)
        self.smear_2 = Smear(config.n_embd)
        self.attention = Attention(config)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x: Tensor, x0: Tensor, v1: Tensor | None, view: View, cache: Cache, name: str
    ) -> tuple[Tensor, Tensor]:
        x = x + self.stream_mix * x0
        y = self.smear_1(rms_norm(x), view, cache, f"{name}.smear_1")
        y, v1 = self.attention(y, v1, view, cache, name)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.smear_2(rms_norm(x), view, cache, f"{name}.smear_2")
        y = self.down(F.relu(self.up(y)).square())
        return x + F.dropout(y, self.dropout, self.training), v1


class ModernForCausalLM(PreTrainedModel, GenerationMixin):
    """Token ids in, logits out; `generate` moves the window on when the context is full."""

    config_class = ModernConfig

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        rows = getattr(config, "ngram_rows", 0)  # older exports have none
        self.ngrams = NGramEmbedding(rows, config.n_embd) if rows else None
        self.smear = Smear(config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.token_embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids: (B, T) the tokens after those in the cache.
            attention_mask: (B, S) 0 for padding, else 1; by default there is none.
            position_ids: (B, T), by default counted without padding.
            labels: (B, T) the same tokens, for the loss; -100 is not counted.
        """
        cache = past_key_values if isinstance(past_key_values, Cache) else Cache()
        T = input_ids.shape[1]
        mask = cache.extend_mask(attention_mask, input_ids)
        if mask.sum(-1).max() > self.config.block_size:
            raise ValueError(f"more tokens than the context length of {self.config.block_size}")
        if position_ids is None:
            position_ids = (mask.cumsum(-1) - 1).clamp_min(0)[:, -T:]
        column = torch.arange(mask.shape[1], device=mask.device)
        row = column[-T:, None]
        # Padding sees itself, for a softmax over nothing is not a number.
        visible = mask[:, None, None] & (column < row) | (column == row)
        view = View(position_ids, mask[:, -T:, None], visible)
        x = self.token_embedding(input_ids)
        if self.ngrams is not None:
            x = x + self.ngrams(input_ids, view, cache)
        x = x0 = self.smear(rms_norm(x), view, cache, "smear")
        v1 = None
        for i, block in enumerate(self.blocks):
            x, v1 = block(x, x0, v1, view, cache, str(i))
        logits = self.head(rms_norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache else None
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Give the model the newest token, or the newer half of a context that is full."""
        size = self.config.block_size
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        lengths = mask.sum(-1)  # (B,)
        if isinstance(past_key_values, Cache):
            cache = past_key_values
        else:
            cache = Cache((lengths - size).clamp_min(0))
        is_full = lengths - cache.skipped > size
        if is_full.any():
            cache = Cache(torch.where(is_full, lengths - max(1, size // 2), cache.skipped))
        if cache.get_seq_length():
            newest = input_ids[:, -1:]
            return {"input_ids": newest, "past_key_values": cache, "use_cache": use_cache}
        seen = lengths - cache.skipped
        width = int(seen.max())
        padding_first = mask.argsort(dim=-1, stable=True)
        tokens = input_ids.gather(1, padding_first)[:, -width:]
        mask = torch.arange(width, 0, -1, device=seen.device) <= seen[:, None]
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": use_cache,
        }
