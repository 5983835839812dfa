"""The attention of the `modern` architecture.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H.
"""

import torch
from torch import Tensor, nn

from mingpt_ddp.config.keys.model_config import PartConfig
from mingpt_ddp.models.block_parts import BlockSpec, MultiHead
from mingpt_ddp.models.kv_cache import CachePosition, KVCache
from mingpt_ddp.models.ops import norm_and_rotate


class FusedLinear(nn.Linear):
    """A linear layer without bias whose weight is several matrices, concatenated by rows."""

    def __init__(self, inputs: int, outputs: int, parts: int) -> None:
        """
        Args:
            outputs: Number of rows of each matrix.
            parts: Number of matrices. Muon orthogonalizes each matrix by itself.
        """
        super().__init__(inputs, parts * outputs, bias=False)
        self.parts = parts


class RotaryAttention(MultiHead):
    """Causal self-attention with rotary positions, and normalized queries and keys.

    Each block adds a learned fraction of the first block's values to its own values.

    Sources: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Henry et al. 2020, "Query-Key
    Normalization" (arXiv:2010.04245); Zhou et al. 2024, "Value Residual Learning"
    (arXiv:2410.17897).
    """

    rotary = True

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        """
        Args:
            config: Settings of a user's variant of this attention, an instance of the dataclass
                that is registered with it. This class itself has no settings.
        """
        super().__init__(block)
        self.qkv = FusedLinear(block.n_embd, block.n_embd, parts=3)
        self.proj = nn.Linear(block.n_embd, block.n_embd, bias=False)
        self.value_mix = nn.Parameter(torch.empty(block.n_embd))

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
            x: Normalized vectors of the positions from `start` on, (B, T, C).
            rotary: The result of `rotary_table` for these positions, (T, 2, 1, 1, D).
            v1: The values of the first block, (B, H, T, D). None in that block itself.
            cache: Keys and values of earlier positions when sampling. None in training.

        Returns:
            The output for the residual stream, (B, T, C), and the values of the first block.
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

        y = self.attend(q, k, v, cache, start)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.proj(y), v1


def rotary_table(T: int, D: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute the cosine and sine of each position's angles, (T, 2, 1, 1, D).

    The sines in the first half of D are negated, as `norm_and_rotate` expects.
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
