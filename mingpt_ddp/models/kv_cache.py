"""What an attention layer keeps of the characters that it has read, so that each is read once.

Shapes: B sequences, H heads, T new positions, D numbers a head, block_size positions at most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt_ddp.models.ops import causal_attention

CachePosition = (
    int | Tensor
)  # how many positions lie before the new ones; a tensor on the device, of shape (), in a captured step


class KVCache:
    """The keys and values of one layer."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            shape: (B, H, block_size, D).
        """
        self.keys = torch.zeros(shape, dtype=dtype, device=device)  # zeros: a captured step multiplies what is masked
        self.values = torch.zeros_like(self.keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: CachePosition) -> Tensor:
        """Keep the new keys and values, and look at them and at the older ones.

        Args:
            q, k, v: (B, H, T, D) of the positions from `start` on; T is 1 if `start` is a tensor.
            start: what stands in the cache behind it is overwritten or not looked at.

        Returns:
            (B, H, T, D), each position a mean of the values up to its own.
        """
        if isinstance(start, Tensor):  # nothing here may depend on its value but the contents of tensors
            place = start.view(1)
            self.keys.index_copy_(2, place, k)
            self.values.index_copy_(2, place, v)
            seen = torch.arange(self.keys.shape[2], device=q.device) <= place  # (block_size,)
            return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen.expand(q.shape[2], -1))
        T = q.shape[2]
        stop = start + T
        self.keys.narrow(2, start, T).copy_(k)
        self.values.narrow(2, start, T).copy_(v)
        return causal_attention(q, self.keys.narrow(2, 0, stop), self.values.narrow(2, 0, stop))


def rows(table: Tensor, start: CachePosition, T: int) -> Tensor:
    """The rows (T, ...) of a table by position (block_size, ...) that belong to the positions from `start` on."""
    return table[start : start + T] if isinstance(start, int) else table.index_select(0, start.view(1))
