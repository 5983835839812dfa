"""The architecture `modern` of mingpt_ddp, for the transformers library.

mingpt_ddp copies this file into every export of such a model. It needs only torch and transformers,
not mingpt_ddp.

Shapes: B is the number of sequences, T the number of new tokens, and S >= T the number of cached
and new tokens. C is n_embd, H is n_head, and D = C / H is the size of a head.

A sequence may have padding at either end. No token attends to padding, and padding does not count
in the positions.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# Name of the cache in the output of the model, and in the arguments that `generate` passes to it.
# Up to transformers 5.23 it is past_key_values, since then it is cache.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"


class Cache:
    """The decoding state of the model after the tokens so far.

    It holds the keys and values of every block, and the newest inputs of the smears and the n-gram
    embedding. It cannot be cropped to fewer tokens, because older inputs are not kept.
    """

    # transformers 5 reads these attributes.
    is_croppable = False
    is_compileable = False
    is_linear = (False,)

    def __init__(self, skipped: Tensor | int = 0) -> None:
        """
        Args:
            skipped: (B,) number of tokens at the start of each text that the model no longer sees.
        """
        self.skipped = skipped
        self.tensors: dict[str, Tensor] = {}  # cached tensors, by names such as "0.keys"
        self.mask: Tensor | None = None  # (B, S), False for padding

    def extend(self, name: str, x: Tensor) -> Tensor:
        """Append x (..., T, D) to the cached tensor of this name. Return the result (..., S, D)."""
        if name in self.tensors:
            x = torch.cat([self.tensors[name], x], dim=-2)
        self.tensors[name] = x
        return x

    def prepend_last(self, name: str, x: Tensor, count: int) -> Tensor:
        """Prepend the vectors of the previous `count` tokens to x, and cache the last `count`.

        Before the start of a text, the vectors are zeros.

        Args:
            x: (B, T, N) vectors of the new tokens, with any number N of elements.

        Returns:
            (B, count + T, N)
        """
        last = self.tensors.get(name)
        if last is None:
            last = x.new_zeros(x.shape[0], count, x.shape[2])
        x = torch.cat([last, x], dim=1)
        self.tensors[name] = x[:, -count:]
        return x

    def extend_mask(self, mask: Tensor | None, tokens: Tensor) -> Tensor:
        """Return the mask of the cached and new tokens (B, S), and keep it.

        Args:
            mask: (B, S) the caller's mask. If None, no new token is padding.
            tokens: (B, T) ids of the new tokens.
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
        """Select the sequences that beam search continues.

        Args:
            rows: Indices of the sequences in the batch.
        """
        self.tensors = {name: x.index_select(0, rows) for name, x in self.tensors.items()}
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows)
        if isinstance(self.skipped, Tensor):
            self.skipped = self.skipped.index_select(0, rows)


def find_our_cache(*caches: Any) -> Cache | None:
    """Return the first cache of our class, or None if there is none.

    `generate` passes a cache of transformers to the first step. It is empty, and we ignore it.
    """
    for cache in caches:
        if isinstance(cache, Cache):
            return cache
    return None


class View(NamedTuple):
    """The positions of the new tokens, and the tokens that each of them attends to."""

    positions: Tensor  # (B, T)
    is_token: Tensor  # (B, T, 1), False for padding
    visible: Tensor  # (B, 1, T, S), True where a new token attends to a token


class ModernConfig(PretrainedConfig):
    """The configuration of a model.

    Its keys are vocab_size, block_size (the context length), n_layer, n_head, n_embd, dropout and
    ngram_rows (the rows of the n-gram table, 0 for none).
    """

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
    """Rotate each pair of elements (i, i + D / 2) by an angle that grows with the position.

    Args:
        x: (B, H, T, D) queries or keys.
        positions: (B, T) positions of the tokens.
    """
    D = x.shape[-1]
    frequencies = 10_000.0 ** (-2 * torch.arange(D // 2, device=x.device) / D)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)  # (B, 1, T, D)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Smear(nn.Module):
    """A layer that adds a fraction of the previous token's vector to the vector of each token.

    Each channel has its own learned fraction.
    """

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x: Tensor, view: View, cache: Cache, name: str) -> Tensor:
        # (B, 1 + T, C)
        vectors = cache.prepend_last(name, x * view.is_token.to(x.dtype), 1)
        return x + self.share * vectors[:, :-1]


class NGramEmbedding(nn.Module):
    """An embedding that joins vectors for the newest 2, 3, 4 and 5 tokens at each position.

    A hash of the tokens' ids selects the row of the table. Each vector has C / 4 elements.
    """

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, n_embd // 4)

    def forward(self, tokens: Tensor, view: View, cache: Cache) -> Tensor:
        new_ids = (tokens + 1)[..., None] * view.is_token  # 0 stands for padding
        ids = cache.prepend_last("ngrams", new_ids, 4)[..., 0]  # (B, 4 + T), 0 before the text
        T = tokens.shape[1]
        hashed = ids[:, 4:]
        rows = []
        for n in (2, 3, 4, 5):
            hashed = (hashed * 1_103_515_245 + ids[:, 5 - n : 5 - n + T]) % ((1 << 31) - 1)
            rows.append(hashed % self.table.num_embeddings)
        return self.table(torch.stack(rows, dim=-1)).flatten(2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys.

    `v1` are the values of the first block. Each block multiplies them by a learned factor for each
    channel, and adds them to its own values.
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
        # q, k and v are (B, H, T, D).
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q = rotate(rms_norm(q), view.positions)
        k = rotate(rms_norm(k), view.positions)
        v1 = v if v1 is None else v1
        v = v + self.value_mix.view(self.n_head, 1, -1) * v1
        # Now k and v are (B, H, S, D).
        k = cache.extend(f"{name}.keys", k)
        v = cache.extend(f"{name}.values", v)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=view.visible, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), v1


class Block(nn.Module):
    """Attention, then an MLP that is four times as wide. Both add to the residual stream."""

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
    """The language model: it takes token ids and returns logits.

    `generate` can write more tokens than the context length. Whenever the context is full, the
    model forgets the older half of the tokens.
    """

    config_class = ModernConfig
    # Tells `generate` to refuse speculative decoding, which would have to crop the cache.
    _is_stateful = True

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        rows = getattr(config, "ngram_rows", 0)  # older exports do not have this key
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
        """Compute the logits of the next token at each position, and the loss if there are labels.

        Args:
            input_ids: (B, T) ids of the new tokens, which follow the tokens in the cache.
            attention_mask: (B, S) 0 for padding, 1 for other tokens. By default, there is no
                padding.
            position_ids: (B, T) positions of the new tokens. By default, they are counted without
                padding.
            past_key_values: The cache under the name that older versions of transformers use.
            labels: (B, T) usually the same ids as input_ids: the loss compares the logits at each
                position with the next label. A label of -100 does not count.
            use_cache: Return the cache with the output.
            cache: The cache that an earlier call returned.
        """
        cache = find_our_cache(cache, past_key_values) or Cache()
        T = input_ids.shape[1]
        mask = cache.extend_mask(attention_mask, input_ids)
        # torch.export and torch.compile cannot trace a branch that depends on a value in a tensor.
        # While they trace, check the length that includes padding instead.
        is_traced = torch.compiler.is_compiling()
        longest = mask.shape[1] if is_traced else mask.sum(-1).max()
        if longest > self.config.block_size:
            raise ValueError(
                f"there are more tokens than the context length, {self.config.block_size}"
            )
        if position_ids is None:
            position_ids = (mask.cumsum(-1) - 1).clamp_min(0)[:, -T:]
        column = torch.arange(mask.shape[1], device=mask.device)
        row = column[-T:, None]
        # Padding attends to itself: a softmax over no tokens at all would give NaN.
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
        cache_output = {CACHE: cache} if use_cache else {}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **cache_output)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        cache: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of the model for the next step of `generate`.

        If only one token is new, the model reads this token. If the context of a text is full, the
        model reads the newer half of it again. If a text has grown by more than one token since it
        was cached, the model reads the whole text again.
        """
        size = self.config.block_size
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        lengths = mask.sum(-1)  # (B,) numbers of tokens without padding
        cache = find_our_cache(cache, past_key_values)
        if cache is None:
            cache = Cache((lengths - size).clamp_min(0))
        is_full = lengths - cache.skipped > size
        if is_full.any():
            cache = Cache(torch.where(is_full, lengths - max(1, size // 2), cache.skipped))
        seen = lengths - cache.skipped  # (B,) numbers of tokens that the model sees
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
        """Generate tokens as transformers does, but refuse to be the assistant of another model.

        An assistant drafts several tokens. If the other model accepts only some of them, the cache
        of the assistant must be cropped, which is not possible here.
        """
        if getattr(kwargs.get("generation_config"), "is_assistant", False):
            raise ValueError(
                "ModernForCausalLM cannot be an assistant_model: its cache cannot be cropped"
            )
        return super().generate(*args, **kwargs)
