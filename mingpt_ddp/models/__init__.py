"""Model architectures (`model.architecture`), and the protocols that models implement.

Shapes: B sequences, T tokens, T <= block_size (the context length), V = vocab_size.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.model_config import ModelConfig, TransformerConfig
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern

BUILDERS["model"].update(gpt=GPT, modern=Modern)


class ModelProtocol(Protocol):
    """The interface of every model: an nn.Module with this forward."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of the next token, or the loss if targets are given.

        The logits at a position may depend only on the tokens up to that position. Draw random
        numbers from torch's global generators, which are seeded before every call. In evaluation
        mode, draw none.

        Args:
            tokens: Token ids below V, (B, T) int64.
            targets: The next token after each token, (B, T) int64.

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per token, a scalar.
        """


@runtime_checkable
class SupportsKVCache(Protocol):
    """Optional methods for a KV cache.

    With a cache, sampling reads each token once. Without one, it reads the whole context again for
    each new token.
    """

    def new_cache(self, batch: int, dtype: torch.dtype) -> Any:
        """Allocate a cache for `batch` sequences."""

    def decode(self, tokens: Tensor, cache: Any, start: int) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        Args:
            start: Number of cached tokens before the new tokens. Ignore the cache entries from this
                position on. At 0, a new text begins.
        """


def has_cache(model: nn.Module) -> TypeGuard[SupportsKVCache]:
    """Return True if a model can decode with a KV cache.

    A built-in model has an attribute `has_cache`. It is True if all parts of its blocks can decode
    with a cache.
    """
    return isinstance(model, SupportsKVCache) and bool(getattr(model, "has_cache", True))


@runtime_checkable
class SupportsCUDAGraphDecode(SupportsKVCache, Protocol):
    """Optional method for decoding in a CUDA graph.

    On a GPU, sampling captures `step` in a CUDA graph and replays it for each token. The functions
    of `mingpt_ddp.models.kv_cache` can be captured.
    """

    def step(self, tokens: Tensor, cache: Any, position: Tensor) -> Tensor:
        """Return the logits (B, V) after one new token per sequence.

        The logits are the same as from `decode(tokens[:, None], cache, int(position))`. Shapes and
        operations must not depend on the value of `position`, and the host must not read it.

        Args:
            tokens: The new token of each sequence, (B,).
            position: Number of cached tokens, an int64 tensor of shape () on the model's device.
        """


def has_graph_step(model: nn.Module) -> TypeGuard[SupportsCUDAGraphDecode]:
    """Return True if decoding with this model can be captured in a CUDA graph."""
    has_step = has_cache(model) and isinstance(model, SupportsCUDAGraphDecode)
    return has_step and bool(getattr(model, "has_graph_step", True))


@runtime_checkable
class SupportsSeveralDevices(Protocol):
    """Optional method of a model whose layers are on several devices of a rank.

    Its `forward` moves the input of each layer to the device of that layer. See
    examples/model_parallel.py.
    """

    def to_devices(self, device: torch.device) -> None:
        """Move each layer to its device. Called instead of `to(device)`.

        Args:
            device: Device of the rank. `forward` gets its batch and returns its result there.
        """


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device and return it. It may spread its layers over several devices."""
    if isinstance(model, SupportsSeveralDevices):
        model.to_devices(device)
        return model
    return model.to(device)


@runtime_checkable
class SupportsFlopsCount(Protocol):
    """Optional method that counts operations. The log then shows the model FLOPs utilization."""

    def flops_per_token(self) -> float:
        """Count the operations of a forward and backward pass, per token of a full context."""


def flops_per_token(model: nn.Module) -> float | None:
    """Return the operations per token as the model counts them.

    Return None if the model has no method `flops_per_token`.

    Raises:
        CodeError: A user's model returned something other than a number above 0.
    """
    if not isinstance(model, SupportsFlopsCount):
        return None
    count = model.flops_per_token()
    if not isinstance(count, (int, float)) or not 0 < count < math.inf:
        raise CodeError(
            f"{type(model).__name__}.flops_per_token() must return a number above 0, not {count!r}"
        )
    return float(count)


def build_model(config: ModelConfig, outputs: int, inputs: int | tuple[int, ...]) -> nn.Module:
    """Build the model that `config` describes. Draw its weights from torch's global generator.

    Args:
        outputs: The vocabulary size of a language model. For other models, the number of classes or
            target features.
        inputs: The context length of a language model, which becomes its attribute `block_size`
            unless the model sets that itself. For other models, the shape of an input.

    Raises:
        CodeError: The user's builder returned something other than an nn.Module.
        ConfigError: The model does not take inputs of this shape.
    """
    if isinstance(config, TransformerConfig) and not isinstance(inputs, int):
        raise ConfigError(
            f"model.architecture={config.architecture} takes token ids; choose a text, or "
            "samples of torch.int64 with shape (tokens,)"
        )
    build = BUILDERS["model"][config.architecture]
    model = build(config, outputs, inputs)
    if not isinstance(model, nn.Module):
        raise CodeError(
            f"the model {config.architecture} must be an nn.Module, not {type(model).__name__}"
        )
    if isinstance(inputs, int):
        # Look in the instance only, because its class may have an attribute of the same name.
        vars(model).setdefault("block_size", inputs)
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode in this context, then restore its mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model at the end. Forward passes in this context may change them."""
    before = [buffer.clone() for buffer in model.buffers()]
    yield
    for buffer, kept in zip(model.buffers(), before, strict=True):
        buffer.copy_(kept)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def apply_activation_checkpointing(model: nn.Module) -> None:
    """Save memory: keep only the input of each block, and recompute its activations in backward.

    The blocks are `model.blocks`. The RNG state is preserved, so dropout masks and gradients are
    bit-identical. Parameter names and passes without gradients do not change.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    Raises:
        ConfigError: The model has no `blocks`.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            "trainer.activation_checkpointing=true needs a model with an nn.ModuleList named "
            f"blocks, but {type(model).__name__} has none; set the key to false"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
