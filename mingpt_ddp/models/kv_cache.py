"""The KV cache of an attention layer, with which decoding reads every token only once.

Shapes: B sequences, H heads, T new positions, D = head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp.models.ops import causal_attention, masked_bias

# Number of positions before the new ones. In a CUDA graph it is a tensor of shape () whose value
# only the device knows.
CachePosition = int | Tensor


class KVCache:
    """The keys and values of one layer, for all positions of a context."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            shape: (B, H, block_size, D).
        """
        # Zeros, because a NaN at a masked position would still spread to the results.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    cache: KVCache | None,
    start: CachePosition,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend causally. With a cache, attend also to the positions before the first query.

    Args:
        q, k, v: Queries, keys and values of the positions from `start` on, (B, H, T, D). T is 1 if
            `start` is a tensor.
        dropout: Probability of dropping an attention weight. Ignored with a cache.
        cache: Stores the new keys and values. Its entries from `start` on are overwritten or
            ignored. None in training.
        bias: Added to the scaled scores, (H or 1, T, S). The number of keys S is start + T, or
            block_size if `start` is a tensor.

    Returns:
        (B, H, T, D)
    """
    if cache is None:
        return causal_attention(q, k, v, dropout, bias)
    if isinstance(start, Tensor):
        return _attend_at(q, k, v, cache, start, bias)

    T = q.shape[2]
    stop = start + T
    cache.keys.narrow(2, start, T).copy_(k)
    cache.values.narrow(2, start, T).copy_(v)
    keys = cache.keys.narrow(2, 0, stop)  # (B, H, stop, D)
    values = cache.values.narrow(2, 0, stop)
    return causal_attention(q, keys, values, bias=bias)


def _attend_at(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, start: Tensor, bias: Tensor | None
) -> Tensor:
    """Attend from one new position, with operations that do not depend on the value of `start`."""
    index = start.view(1)
    cache.keys.index_copy_(2, index, k)
    cache.values.index_copy_(2, index, v)
    positions = torch.arange(cache.keys.shape[2], device=q.device)
    is_visible = (positions <= index).expand(q.shape[2], -1)  # (T, block_size)
    mask = is_visible if bias is None else masked_bias(bias, is_visible, q.dtype)
    return F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=mask)


def select_positions(table: Tensor, start: CachePosition, T: int) -> Tensor:
    """Return T rows of a table from `start` on. T is 1 if `start` is a tensor.

    Args:
        table: One row for each position, (block_size, ...).
    """
    if isinstance(start, Tensor):
        return table.index_select(0, start.view(1))
    return table[start : start + T]
