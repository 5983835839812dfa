"""The parts of a block: the user's registered ones, and the attention that variants begin with.

Shapes: B sequences, T tokens, C = n_embd, H = n_head heads of D = C / H.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.model_config import PARTS, PartConfig, TransformerConfig
from mingpt_ddp.config.user_code import check_takes
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models.kv_cache import CachePosition, KVCache, attend
from mingpt_ddp.models.ops import relu_squared

LABEL = "label_of_part"  # attribute of a user's module, as model.mlp=mine
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu_squared": relu_squared,
}


@dataclass(frozen=True)
class BlockSpec:
    """What a part knows of its block and its model."""

    n_embd: int  # C
    n_head: int  # H, a divisor of C
    n_layer: int  # blocks of the model
    layer: int  # of this block, from 0; n_layer for the norm after the last block
    block_size: int  # tokens of a context
    dropout: float  # probability; the block itself drops what attention and MLP return
    bias: bool  # whether linear layers and norms have biases
    activation: Activation  # of this block, for an MLP: an nn.Module or a function


class FunctionPart(nn.Module):
    """A part that a user has registered as a function (x, config)."""

    cuda_graph = True

    def __init__(self, function: Callable[[Tensor, PartConfig], Tensor], config: PartConfig):
        super().__init__()
        self.function = function
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.config)


def block_spec(
    config: TransformerConfig, block_size: int, layer: int, bias: bool = False
) -> BlockSpec:
    """Describe a block, and build its activation."""
    spec = BlockSpec(
        n_embd=config.n_embd,
        n_head=config.n_head,
        n_layer=config.n_layer,
        layer=layer,
        block_size=block_size,
        dropout=config.dropout,
        bias=bias,
        activation=ACTIVATIONS.get(config.activation, F.gelu),
    )
    activation = own_part("activation", config, spec)
    return spec if activation is None else replace(spec, activation=activation)


def own_part(kind: str, config: TransformerConfig, spec: BlockSpec) -> nn.Module | None:
    """Build the part that a user has registered; None if the architecture's own is chosen.

    Raises:
        CodeError: a class that is no nn.Module, or what cannot be called as a part is.
        ConfigError: the architecture lacks what the part takes.
    """
    name = getattr(config, kind)
    builder = BUILDERS[kind].get(name)
    if builder is None:
        return None
    part_config = config.part_configs()[kind]
    label = f"the {kind} {name}"
    if not isinstance(builder, type):
        check_takes(builder, ("x", "config"), label)
        return _labelled(FunctionPart(builder, part_config), kind, name)
    check_takes(builder, ("config", "block"), label)
    part = builder(part_config, spec)
    if not isinstance(part, nn.Module):
        raise CodeError(f"{label} must be an nn.Module, not {type(part).__name__}")
    if getattr(part.forward, "__func__", None) is nn.Module.forward:
        raise CodeError(f"{label} must have a method forward")
    takes_rotary = getattr(part, "rotary", False)
    if takes_rotary and config.architecture != "modern":
        raise ConfigError(
            f"model.{kind}={name} is a RotaryAttention, which needs model.architecture=modern; "
            "derive it from Attention"
        )
    taken = ["x"]
    if takes_rotary:
        taken += ["rotary", "v1"]
    if takes_rotary or hasattr(part, "new_cache"):
        taken += ["cache", "start"]
    check_takes(part.forward, taken, f"forward of {label}")
    return _labelled(part, kind, name)


def _labelled(part: nn.Module, kind: str, name: str) -> nn.Module:
    """Set the name by which the check of what parts return finds them."""
    if kind != "activation":  # whose shapes the user's MLP knows
        vars(part)[LABEL] = f"model.{kind}={name}"
    return part


def decodes_with_cache(config: TransformerConfig) -> bool:
    """Return whether all parts can decode with a cache: attention has one, others need none."""
    builders = _own_builders(config)
    attention = builders.get("attention", MultiHead)
    recomputes = any(getattr(builder, "recomputes", False) for builder in builders.values())
    return hasattr(attention, "new_cache") and not recomputes


def decodes_in_graph(config: TransformerConfig) -> bool:
    """Return whether all parts say of themselves that a CUDA graph can hold them.

    A class does not inherit that: a variant may read the value of a position.
    """
    for builder in _own_builders(config).values():
        if not vars(builder).get("cuda_graph", not isinstance(builder, type)):
            return False
    return True


def _own_builders(config: TransformerConfig) -> dict[str, Any]:
    """Return the user's classes and functions of the chosen parts, by kind."""
    chosen = {kind: BUILDERS[kind].get(getattr(config, kind)) for kind in PARTS}
    return {kind: builder for kind, builder in chosen.items() if builder is not None}


class MultiHead(nn.Module):
    """Heads that attend causally, with a KV cache: what `Attention` and `RotaryAttention` share.

    Attributes:
        n_head: H; tensor parallelism lowers it to the heads of this rank.
        head_size: D.
        dropout: probability of dropping an attention weight.
    """

    rotary = False  # whether `forward` gets what `modern` knows besides, see `RotaryAttention`

    def __init__(self, block: BlockSpec) -> None:
        super().__init__()
        self.n_head = block.n_head
        self.head_size = block.n_embd // block.n_head
        self.dropout = block.dropout

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | None = None,
        start: CachePosition = 0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend causally, with a cache also to the positions before the first query.

        Args:
            q, k, v: (B, H, T, D) of the positions from `start` on; computed in the type of v.
            bias: (H or 1, T, S) added to the scaled scores of S = start + T keys.

        Returns:
            (B, H, T, D)
        """
        weight_dropout = self.dropout if self.training else 0.0
        return attend(q.to(v.dtype), k.to(v.dtype), v, weight_dropout, cache, start, bias)

    def new_cache(self, batch: int, block_size: int, dtype: torch.dtype) -> KVCache:
        """Allocate a cache of block_size positions for `batch` sequences."""
        shape = (batch, self.n_head, block_size, self.head_size)
        return KVCache(shape, dtype, next(self.parameters()).device)


class Attention(MultiHead):
    """Causal multi-head self-attention, that of `gpt`; a variant overrides `attend` or `forward`.

    Attributes:
        qkv: the linear layer that makes queries, keys and values, side by side.
        proj: the one that writes to the residual stream.
    """

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        """
        Args:
            config: the keys of a variant, an instance of its registered dataclass.
        """
        super().__init__(block)
        self.qkv = nn.Linear(block.n_embd, 3 * block.n_embd, bias=block.bias)
        self.proj = nn.Linear(block.n_embd, block.n_embd, bias=block.bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, start: CachePosition = 0) -> Tensor:
        """Return (B, T, C) for the residual stream.

        Args:
            x: (B, T, C) normalized, of the positions from `start` on.
            cache: of the positions before, when sampling; None in training.
        """
        qkv = self.qkv(x)  # (B, T, 3C)
        qkv = qkv.unflatten(-1, (3, self.n_head, self.head_size))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, H, T, D)
        y = self.attend(q, k, v, cache, start)  # (B, H, T, D)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C): the heads side by side
        return self.proj(y)


def new_caches(
    blocks: Iterable[nn.Module], batch: int, block_size: int, dtype: torch.dtype
) -> list[Any]:
    """Allocate the caches of the attention of some blocks."""
    return [cast(Any, block).attention.new_cache(batch, block_size, dtype) for block in blocks]


def init_own_weights(module: nn.Module) -> None:
    """Let a part of a user draw its own weights, if it has a method `init_weights`."""
    draw = getattr(module, "init_weights", None)
    if draw is not None:
        draw()
