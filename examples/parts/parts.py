"""Replace parts of the blocks of gpt and modern: activation, norm, attention and MLP.

    python main.py --config-dir=examples/parts model.code=parts.py model.attention=alibi

Each part is registered under a name, which is a value of model.activation, model.norm,
model.attention or model.mlp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.parts import Attention, BlockSpec, CachePosition, KVCache, rms_norm
from mingpt_ddp.registry import PartConfig, register


@register("activation", "snake", PartConfig)
def snake(x: Tensor, config: PartConfig) -> Tensor:
    return x + x.sin().square()


@register("norm", "rms", PartConfig)
def rms(x: Tensor, config: PartConfig) -> Tensor:
    return rms_norm(x)


@register("attention", "temperature", PartConfig)
class Temperature(Attention):
    """Attention with a learnt temperature for each head."""

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        super().__init__(config, block)
        self.scale = nn.Parameter(torch.ones(block.n_head))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None = None,
        start: CachePosition = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        return super().attend(self.scale.view(-1, 1, 1) * q, k, v, cache, start, bias)


@dataclass(frozen=True)
class ALiBiConfig(PartConfig):
    steepness: float = 8.0


@register("attention", "alibi", ALiBiConfig)
class ALiBi(Attention):
    """Attention with a bias that grows with the distance between positions.

    Source: Press et al. 2021, "Train Short, Test Long" (arXiv:2108.12409).
    """

    slopes: Tensor  # (H,)

    def __init__(self, config: ALiBiConfig, block: BlockSpec) -> None:
        super().__init__(config, block)
        heads = torch.arange(1, block.n_head + 1) / block.n_head
        self.register_buffer("slopes", 2.0 ** (-config.steepness * heads), persistent=False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None = None,
        start: CachePosition = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(start, int)  # a tensor only in a CUDA graph, which this part cannot use
        keys = torch.arange(start + q.shape[2], device=q.device)
        distances = keys - keys[start:, None]  # (T, S), at most 0 where a key is visible
        return super().attend(q, k, v, cache, start, self.slopes.view(-1, 1, 1) * distances)


@register("attention", "mean", PartConfig)
class Mean(nn.Module):
    """The mean of all positions so far, in the place of attention. It does not use a KV cache."""

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(block.n_embd, block.n_embd, bias=block.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Average x (B, T, C) over the positions, and project it."""
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.proj(x.cumsum(dim=1) / counts[:, None])


@register("mlp", "swiglu", PartConfig)
class SwiGLU(nn.Module):
    """An MLP with a gate. Source: Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        super().__init__()
        hidden = 8 * block.n_embd // 3
        self.gate = nn.Linear(block.n_embd, hidden, bias=block.bias)
        self.up = nn.Linear(block.n_embd, hidden, bias=block.bias)
        self.down = nn.Linear(hidden, block.n_embd, bias=block.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
