"""Architectures, selected by `model.architecture`, and the protocols that others rely on.

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

        Logits at a position may depend on the tokens up to that position only. Random numbers come
        from torch's global generators, which are seeded before every call; in evaluation mode there
        are none.

        Args:
            tokens: (B, T) int64, below V.
            targets: (B, T) int64, the token that follows each of them.

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per token, a scalar.
        """


@runtime_checkable
class SupportsKVCache(Protocol):
    """Optional: sampling reads every token once instead of the whole context for each new token."""

    def new_cache(self, batch: int, dtype: torch.dtype) -> Any:
        """Allocate a cache for `batch` sequences."""

    def decode(self, tokens: Tensor, cache: Any, start: int) -> Tensor:
        """Return the logits (B, V) after the last of the new `tokens` (B, T).

        They follow `start` cached tokens. Ignore cache entries from `start` on; start = 0 begins
        another text.
        """


def has_cache(model: nn.Module) -> TypeGuard[SupportsKVCache]:
    """Return whether a model decodes with a cache: of ours, whether the parts of its blocks do."""
    return isinstance(model, SupportsKVCache) and bool(getattr(model, "has_cache", True))


@runtime_checkable
class SupportsCUDAGraphDecode(SupportsKVCache, Protocol):
    """Optional: on a GPU, sampling captures `step` in a CUDA graph, replayed for each token.

    Build it from `mingpt_ddp.models.kv_cache`.
    """

    def step(self, tokens: Tensor, cache: Any, position: Tensor) -> Tensor:
        """Return the logits (B, V) after one new token per sequence.

        They are those of `decode(tokens[:, None], cache, int(position))`. Shapes and operations
        must not depend on the value of `position`, and the host must not read it.

        Args:
            tokens: (B,)
            position: number of cached tokens, an int64 tensor of shape () on the model's device.
        """


def has_graph_step(model: nn.Module) -> TypeGuard[SupportsCUDAGraphDecode]:
    """Return whether a CUDA graph can hold the decoding of a model."""
    is_known = has_cache(model) and isinstance(model, SupportsCUDAGraphDecode)
    return is_known and bool(getattr(model, "has_graph_step", True))


@runtime_checkable
class SupportsSeveralDevices(Protocol):
    """Optional: the layers of a model are on several devices of a rank.

    `forward` moves what a layer takes to the layer's device. See examples/model_parallel.py.
    """

    def to_devices(self, device: torch.device) -> None:
        """Move the layers to their devices; called instead of `to(device)`.

        Args:
            device: of the rank, where `forward` gets its batch and returns its result.
        """


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, or let it move its layers to several; return it."""
    if isinstance(model, SupportsSeveralDevices):
        model.to_devices(device)
        return model
    return model.to(device)


@runtime_checkable
class SupportsFlopsCount(Protocol):
    """Optional: MFU is logged."""

    def flops_per_token(self) -> float:
        """Count the operations of a forward and backward pass, per token of a full context."""


def flops_per_token(model: nn.Module) -> float | None:
    """Return the model's own count; None if it has no `flops_per_token`.

    Raises:
        CodeError: a user's model returns something other than a number above 0.
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
    """Build the model that `config` describes; torch's global generator draws its weights.

    Args:
        outputs: classes or target features; of a language model the vocabulary size.
        inputs: the shape of an input; of a language model the context length, set as the attribute
            `block_size` unless the model sets it.

    Raises:
        CodeError: the user's builder returned something other than an nn.Module.
        ConfigError: the model does not take such inputs.
    """
    if isinstance(config, TransformerConfig) and not isinstance(inputs, int):
        raise ConfigError(
            f"model.architecture={config.architecture} takes token ids: a text, or samples of "
            "torch.int64 of shape (tokens,)"
        )
    build = BUILDERS["model"][config.architecture]
    model = build(config, outputs, inputs)
    if not isinstance(model, nn.Module):
        raise CodeError(
            f"the model {config.architecture} must be an nn.Module, not {type(model).__name__}"
        )
    if isinstance(inputs, int):
        vars(model).setdefault("block_size", inputs)  # a class may have an attribute of this name
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, then restore its mode."""
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
    """Save only the input of each of `model.blocks`; backward recomputes other activations.

    The RNG state is preserved, so dropout masks and gradients are bit-identical. Parameter names
    and passes without gradients do not change.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    Raises:
        ConfigError: the model has no `blocks`.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigError(
            "trainer.activation_checkpointing=true needs a model with blocks, an nn.ModuleList, "
            f"and {type(model).__name__} has none; set it to false"
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
