"""The KV cache of an attention layer: decoding reads every token once.

Shapes: B sequences, H heads, T new positions, D = head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp.models.ops import causal_attention

# Number of positions before the new ones. In a CUDA graph it is a tensor of shape () whose value
# only the device knows.
CachePosition = int | Tensor


class KVCache:
    """Keys and values of one layer."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            shape: (B, H, block_size, D).
        """
        # zeros: masked NaN would propagate
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)


def attend(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, cache: KVCache | None, start: CachePosition
) -> Tensor:
    """Attend causally; with a cache, also to the positions before the first query.

    Args:
        q, k, v: (B, H, T, D) of the positions from `start` on; T is 1 if `start` is a tensor.
        dropout: probability of dropping an attention weight; 0 with a cache.
        cache: stores the new keys and values; its entries from `start` on are overwritten or
            ignored.

    Returns:
        (B, H, T, D)
    """
    if cache is None:
        return causal_attention(q, k, v, dropout)
    T = q.shape[2]
    if isinstance(start, Tensor):  # shapes and operations must not depend on the value of `start`
        index = start.view(1)
        cache.keys.index_copy_(2, index, k)
        cache.values.index_copy_(2, index, v)
        visible = torch.arange(cache.keys.shape[2], device=q.device) <= index  # (block_size,)
        return F.scaled_dot_product_attention(
            q, cache.keys, cache.values, attn_mask=visible.expand(T, -1)
        )
    cache.keys.narrow(2, start, T).copy_(k)
    cache.values.narrow(2, start, T).copy_(v)
    return causal_attention(
        q, cache.keys.narrow(2, 0, start + T), cache.values.narrow(2, 0, start + T)
    )


def select_positions(table: Tensor, start: CachePosition, T: int) -> Tensor:
    """Return the rows (T, ...) of `table` (block_size, ...) for the positions from `start` on; T is
    1 for a tensor.
    """
    return (
        table[start : start + T] if isinstance(start, int) else table.index_select(0, start.view(1))
    )
