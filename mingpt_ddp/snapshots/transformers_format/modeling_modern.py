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

# Where an output has the cache, and `generate` passes it: "cache" from transformers 5.24 on.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"


class Cache:
    """Keys and values of every block and the last inputs of every smear, by name.

    A smear keeps its newest input alone, so that the cache cannot go back to fewer tokens.
    """

    # transformers 5 asks for these.
    is_croppable = False
    is_compileable = False
    is_linear = (False,)

    def __init__(self, skipped: Tensor | int = 0) -> None:
        """
        Args:
            skipped: (B,) tokens at the start of each text that the model no longer sees.
        """
        self.skipped = skipped
        self.tensors: dict[str, Tensor] = {}
        self.mask: Tensor | None = None  # (B, S) true where a token is not padding

    def extend(self, name: str, x: Tensor) -> Tensor:
        """Cache x (..., T, D) after what is there, and return both as (..., S, D)."""
        if name in self.tensors:
            x = torch.cat([self.tensors[name], x], dim=-2)
        self.tensors[name] = x
        return x

    def add_last(self, name: str, x: Tensor, count: int) -> Tensor:
        """Return x (B, T, D) after the `count` vectors before it, zeros before the text.

        The last of them are cached.

        Returns:
            (B, count + T, D)
        """
        last = self.tensors.get(name)
        if last is None:
            last = x.new_zeros(x.shape[0], count, x.shape[2])
        x = torch.cat([last, x], dim=1)
        self.tensors[name] = x[:, -count:]
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


def our_cache(*caches: Any) -> Cache | None:
    """Return the one that a step before has filled: `generate` begins with one of transformers."""
    for cache in caches:
        if isinstance(cache, Cache):
            return cache
    return None


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
        known = cache.add_last(name, x * view.is_token.to(x.dtype), 1)  # (B, 1 + T, C)
        return x + self.share * known[:, :-1]


class NGramEmbedding(nn.Module):
    """A vector of C / 4 for each of the 2, 3, 4 and 5 newest tokens, by a hash of their ids."""

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, n_embd // 4)

    def forward(self, tokens: Tensor, view: View, cache: Cache) -> Tensor:
        ids = (tokens + 1)[..., None] * view.is_token  # 0 is before the text
        known = cache.add_last("ngrams", ids, 4)[..., 0]  # (B, 4 + T)
        T = tokens.shape[1]
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
    _is_stateful = True  # `generate` refuses drafts, of which it may take a part

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
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids: (B, T) the tokens after those in the cache.
            attention_mask: (B, S) 0 for padding, else 1; by default there is none.
            position_ids: (B, T), by default counted without padding.
            past_key_values, cache: either name is taken.
            labels: (B, T) the same tokens, for the loss; -100 is not counted.
        """
        cache = our_cache(cache, past_key_values) or Cache()
        T = input_ids.shape[1]
        mask = cache.extend_mask(attention_mask, input_ids)
        # A graph of torch.export or torch.compile has no branch on a value.
        is_traced = torch.compiler.is_compiling()
        longest = mask.shape[1] if is_traced else mask.sum(-1).max()
        if longest > self.config.block_size:
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
        kept = {CACHE: cache} if use_cache else {}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        cache: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Give the model the newest token, or the newer half of a context that is full.

        It reads a text again that has grown by more than a token since it was cached.
        """
        size = self.config.block_size
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        lengths = mask.sum(-1)  # (B,)
        cache = our_cache(cache, past_key_values)
        if cache is None:
            cache = Cache((lengths - size).clamp_min(0))
        is_full = lengths - cache.skipped > size
        if is_full.any():
            cache = Cache(torch.where(is_full, lengths - max(1, size // 2), cache.skipped))
        seen = lengths - cache.skipped
        width = int(seen.max())
        if 0 < cache.get_seq_length() == width - 1:
            newest = input_ids[:, -1:]
            return {"input_ids": newest, CACHE: cache, "use_cache": use_cache}
        padding_first = mask.argsort(dim=-1, stable=True)
        tokens = input_ids.gather(1, padding_first)[:, -width:]
        mask = torch.arange(width, 0, -1, device=seen.device) <= seen[:, None]
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            CACHE: Cache(cache.skipped),
            "use_cache": use_cache,
        }

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Do as transformers does, but refuse to draft for another model, which may take a part."""
        if getattr(kwargs.get("generation_config"), "is_assistant", False):
            raise ValueError(
                "ModernForCausalLM cannot be an assistant_model: its cache cannot be cropped"
            )
        return super().generate(*args, **kwargs)
