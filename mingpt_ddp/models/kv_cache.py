"""The KV cache of an attention layer: decoding reads every token once.

Shapes: B sequences, H heads, T new positions, D = head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp.models.ops import causal_attention

# Number of positions before the new ones. In a CUDA graph it is a tensor of shape () whose value only the device knows.
CachePosition = int | Tensor


class KVCache:
    """Keys and values of one layer."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            shape: (B, H, block_size, D).
        """
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: with a mask, stale NaN would spread
        self.values = torch.zeros_like(self.keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: CachePosition) -> Tensor:
        """Store the new keys and values, then attend to all positions up to each query's own.

        Args:
            q, k, v: (B, H, T, D) of the positions from `start` on; T is 1 if `start` is a tensor.
            start: entries of the cache from there on are overwritten or ignored.

        Returns:
            (B, H, T, D)
        """
        T = q.shape[2]
        if isinstance(start, Tensor):  # shapes and operations must not depend on the value of `start`
            index = start.view(1)
            self.keys.index_copy_(2, index, k)
            self.values.index_copy_(2, index, v)
            visible = torch.arange(self.keys.shape[2], device=q.device) <= index  # (block_size,)
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=visible.expand(T, -1))
        self.keys.narrow(2, start, T).copy_(k)
        self.values.narrow(2, start, T).copy_(v)
        return causal_attention(q, self.keys.narrow(2, 0, start + T), self.values.narrow(2, 0, start + T))


def select_positions(table: Tensor, start: CachePosition, T: int) -> Tensor:
    """Return the rows (T, ...) of `table` (block_size, ...) for the positions from `start` on; T is 1 for a tensor."""
    return table[start : start + T] if isinstance(start, int) else table.index_select(0, start.view(1))
