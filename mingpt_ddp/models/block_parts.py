"""The parts of a transformer block: parts that a user has registered, and the default attention.

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

# A user's module has an attribute of this name. It holds the name of the module in messages, such
# as "model.mlp=mine".
PART_LABEL = "label_of_part"
Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu_squared": relu_squared,
}


@dataclass(frozen=True)
class BlockSpec:
    """The block and the model for which a part is built."""

    n_embd: int  # C
    n_head: int  # H, a divisor of C
    n_layer: int  # number of blocks in the model
    layer: int  # index of this block, from 0; n_layer for the norm after the last block
    block_size: int  # context length in tokens
    # Probability of dropout. The block itself applies dropout to the outputs of attention and MLP.
    dropout: float
    bias: bool  # True if linear layers and norms have biases
    activation: Activation  # activation for the MLP of this block: an nn.Module or a function


class FunctionPart(nn.Module):
    """A part that a user has registered as a function with the parameters (x, config)."""

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
    """Describe a block for its parts, and build its activation."""
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
    activation = user_part("activation", config, spec)
    return spec if activation is None else replace(spec, activation=activation)


def user_part(kind: str, config: TransformerConfig, spec: BlockSpec) -> nn.Module | None:
    """Build a part that a user has registered. Return None if the built-in part is chosen.

    Args:
        kind: Kind of the part: attention, mlp, norm or activation.

    Raises:
        CodeError: The class is not an nn.Module, or it cannot be called with a part's arguments.
        ConfigError: The part needs another architecture.
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
    """Label a part, so that tasks/causality.py checks the shape of its output."""
    if kind != "activation":  # an activation may return any shape that the MLP around it takes
        vars(part)[PART_LABEL] = f"model.{kind}={name}"
    return part


def decodes_with_cache(config: TransformerConfig) -> bool:
    """Return True if this model can decode with a KV cache.

    Its attention must have a cache. And no part may need the vectors of earlier tokens again: such
    a part sets `recomputes = True` in its class.
    """
    builders = _user_builders(config)
    attention = builders.get("attention", MultiHead)
    recomputes = any(getattr(builder, "recomputes", False) for builder in builders.values())
    return hasattr(attention, "new_cache") and not recomputes


def decodes_in_graph(config: TransformerConfig) -> bool:
    """Return True if decoding with all parts of this model can be captured in a CUDA graph.

    The class of a part must set `cuda_graph = True` itself. An inherited attribute does not count,
    because a subclass may read the value of `start` on the host, which cannot be captured.
    A function can always be captured.
    """
    for builder in _user_builders(config).values():
        if not vars(builder).get("cuda_graph", not isinstance(builder, type)):
            return False
    return True


def _user_builders(config: TransformerConfig) -> dict[str, Any]:
    """Return the chosen parts that a user has registered: a class or function for each kind."""
    chosen = {kind: BUILDERS[kind].get(getattr(config, kind)) for kind in PARTS}
    return {kind: builder for kind, builder in chosen.items() if builder is not None}


class MultiHead(nn.Module):
    """Causal heads with a KV cache: the base class of `Attention` and `RotaryAttention`.

    Attributes:
        n_head: H. Tensor parallelism lowers it to the number of heads on this rank.
        head_size: D.
        dropout: Probability of dropping an attention weight.
    """

    # True if `forward` takes the arguments `rotary` and `v1`, as in `RotaryAttention`.
    rotary = False

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
        """Attend causally. With a cache, attend also to the positions before the first query.

        Args:
            q, k, v: Queries, keys and values of the positions from `start` on, (B, H, T, D). The
                result is computed in the type of v.
            bias: Added to the scaled scores of S = start + T keys, (H or 1, T, S).

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
    """Causal multi-head self-attention, as in the architecture `gpt`.

    A variant overrides `attend` or `forward`.

    Attributes:
        qkv: The linear layer that computes queries, keys and values, side by side.
        proj: The linear layer that writes to the residual stream.
    """

    def __init__(self, config: PartConfig, block: BlockSpec) -> None:
        """
        Args:
            config: Settings of a user's variant of this attention, an instance of the dataclass
                that is registered with it. This class itself has no settings.
        """
        super().__init__(block)
        self.qkv = nn.Linear(block.n_embd, 3 * block.n_embd, bias=block.bias)
        self.proj = nn.Linear(block.n_embd, block.n_embd, bias=block.bias)

    def forward(self, x: Tensor, cache: KVCache | None = None, start: CachePosition = 0) -> Tensor:
        """Return the output of attention, (B, T, C).

        Args:
            x: Normalized vectors of the positions from `start` on, (B, T, C).
            cache: Keys and values of earlier positions when sampling. None in training.
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
    """Allocate a KV cache for the attention of each block."""
    return [cast(Any, block).attention.new_cache(batch, block_size, dtype) for block in blocks]


def init_user_weights(module: nn.Module) -> None:
    """Let a user's part draw its own weights, if it has a method `init_weights`."""
    draw = getattr(module, "init_weights", None)
    if draw is not None:
        draw()
