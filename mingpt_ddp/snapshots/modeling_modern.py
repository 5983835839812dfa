"""The architecture `modern` of mingpt_ddp for transformers. An export copies this file, which imports nothing of ours.

Shapes: B sequences, T tokens, S >= T tokens with those in the cache, C = n_embd, H = n_head heads of D = C / H.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Cache:
    """Keys and values of every block and the last inputs of every smear, by name."""

    def __init__(self, start: int = 0) -> None:
        """
        Args:
            start: the first token of the text that the model sees.
        """
        self.start, self.length, self.tensors = start, 0, dict[str, Tensor]()

    def extend(self, name: str, x: Tensor, keep: int | None = None) -> Tensor:
        """Return the cached tensor with x appended along the last dimension but one; cache its last `keep` entries."""
        x = torch.cat([self.tensors[name], x], dim=-2) if name in self.tensors else x
        self.tensors[name] = x if keep is None else x[..., -keep:, :]
        return x

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.length

    def reorder_cache(self, rows: Tensor) -> None:
        """Select the sequences that beam search continues."""
        self.tensors = {name: x.index_select(0, rows) for name, x in self.tensors.items()}


class ModernConfig(PretrainedConfig):
    """vocab_size, block_size (context length), n_layer, n_head, n_embd, dropout."""

    model_type = "mingpt_modern"
    attribute_map: ClassVar[dict[str, str]] = {
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        "max_position_embeddings": "block_size",
    }


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (math.sqrt(x.shape[-1]) / norm.clamp_min(1e-6)).to(x.dtype)


def rotate(x: Tensor, first: int) -> Tensor:
    """Rotate each pair of elements (i, i + D / 2) of x (B, H, T, D) by the angle of its position, from `first` on."""
    T, D = x.shape[-2:]
    frequencies = 10_000.0 ** (-2 * torch.arange(D // 2, device=x.device) / D)
    angles = torch.outer(torch.arange(first, first + T, device=x.device), frequencies).repeat(1, 2)  # (T, D)
    a, b = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat([-b, a], dim=-1) * angles.sin().to(x.dtype)


class Smear(nn.Module):
    """Add a learned fraction of the previous token's vector to each token's, per channel."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x: Tensor, cache: Cache, name: str) -> Tensor:
        before = cache.extend(name, x, keep=1)[:, :-1]
        return x + self.share * F.pad(before, (0, 0, x.shape[1] - before.shape[1], 0))


class Attention(nn.Module):
    """Causal self-attention with rotary positions, normalized queries and keys, and the first block's values added."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_mix = nn.Parameter(torch.ones(config.n_embd))

    def forward(self, x: Tensor, v1: Tensor | None, cache: Cache, name: str) -> tuple[Tensor, Tensor]:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = rotate(rms_norm(q), cache.length), rotate(rms_norm(k), cache.length)
        v1 = v if v1 is None else v1
        v = v + self.value_mix.view(self.n_head, 1, -1) * v1
        k, v = cache.extend(f"{name}.keys", k), cache.extend(f"{name}.values", v)  # (B, H, S, D)
        visible = torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(cache.length)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), v1


class Block(nn.Module):
    """Attention, then an MLP four times as wide; each adds to the residual stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.stream_mix = nn.Parameter(torch.zeros(config.n_embd))
        self.smear_1, self.smear_2 = Smear(config.n_embd), Smear(config.n_embd)
        self.attention = Attention(config)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, x0: Tensor, v1: Tensor | None, cache: Cache, name: str) -> tuple[Tensor, Tensor]:
        x = x + self.stream_mix * x0
        y, v1 = self.attention(self.smear_1(rms_norm(x), cache, f"{name}.smear_1"), v1, cache, name)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.down(F.relu(self.up(self.smear_2(rms_norm(x), cache, f"{name}.smear_2"))).square())
        return x + F.dropout(y, self.dropout, self.training), v1


class ModernForCausalLM(PreTrainedModel, GenerationMixin):
    """Token ids in, logits out; `generate` moves the window on when the context is full, as mingpt_ddp does."""

    config_class = ModernConfig

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
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
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids: (B, T) the tokens after those in the cache.
            attention_mask: all ones; padding is not supported.
            labels: (B, T) the same tokens, for the loss; -100 is not counted.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("this model does not take padding; give texts of the same number of tokens")
        cache = past_key_values if isinstance(past_key_values, Cache) else Cache()
        if cache.length + input_ids.shape[1] > self.config.block_size:
            raise ValueError(f"more tokens than the context length of {self.config.block_size}")
        x = x0 = self.smear(rms_norm(self.token_embedding(input_ids)), cache, "smear")
        v1 = None
        for i, block in enumerate(self.blocks):
            x, v1 = block(x, x0, v1, cache, str(i))
        cache.length += input_ids.shape[1]
        logits = self.head(rms_norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Give the model the newest token; the newer half of the context when it is full."""
        n, size = input_ids.shape[1], self.config.block_size
        cache = past_key_values if isinstance(past_key_values, Cache) else Cache(max(0, n - size))
        if n - cache.start > size:
            cache = Cache(n - max(1, size // 2))
        return {
            "input_ids": input_ids[:, cache.start + cache.length :],
            "past_key_values": cache,
            "use_cache": use_cache,
        }
