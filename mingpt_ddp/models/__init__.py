"""The architectures, by the name that `model.architecture` selects, and what the rest of the package asks of one.

Shapes: B sequences, T characters, T <= block_size, V = vocab_size.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt_ddp.config.registry import BUILDERS
from mingpt_ddp.config.schema import ModelConfig
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern

BUILDERS["model"].update(gpt=GPT, modern=Modern)


class LanguageModel(Protocol):
    """All that is needed of a model: an nn.Module that is called like this."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Scores of the next character, or the loss where targets are given.

        A score at a position may depend on the characters up to that position only. Random numbers are those of torch's
        global generators, which are seeded before every call; there are none in evaluation mode.

        Args:
            tokens: (B, T) int64, below V.
            targets: (B, T) int64, the character that follows each of them.

        Returns:
            Logits (B, T, V), or the mean cross-entropy in nats per character, a scalar.
        """


@runtime_checkable
class SupportsKVCache(Protocol):
    """What a model may have besides, so that sampling need not read the whole context for every character."""

    def new_cache(self, batch: int, dtype: torch.dtype) -> Any:
        """Room for what the model keeps of the characters of `batch` sequences."""

    def decode(self, tokens: Tensor, cache: Any, start: int) -> Tensor:
        """Logits (B, V) behind the last of the new `tokens` (B, T), which follow `start` characters in the cache.

        What the cache has from `start` on is of no interest any more: with 0 another text begins.
        """


@runtime_checkable
class SupportsCUDAGraphDecode(SupportsKVCache, Protocol):
    """What a decoder may have besides: a step that a GPU records once and repeats for every character (CUDA graph).

    `model.cache` has the parts for it.
    """

    def step(self, tokens: Tensor, cache: Any, position: Tensor) -> Tensor:
        """Logits (B, V) behind one new character of each sequence: `decode(tokens[:, None], cache, int(position))`.

        Shapes and the choice of operations may not depend on the position, nor may its value be read.

        Args:
            tokens: (B,)
            position: how many characters the cache has, an int64 tensor of shape () on the device of the model.
        """


@runtime_checkable
class SupportsFlopsCount(Protocol):
    """What a model may have besides, so that MFU is logged."""

    def flops_per_token(self) -> float:
        """Floating-point operations of a forward and backward, per character of a sequence of block_size characters."""


def flops_per_token(model: nn.Module) -> float | None:
    """As the model counts them; None where it does not.

    Raises:
        CodeError: what a user's model says is no count.
    """
    if not isinstance(model, SupportsFlopsCount):
        return None
    count = model.flops_per_token()
    if not isinstance(count, (int, float)) or not 0 < count < math.inf:
        raise CodeError(f"{type(model).__name__}.flops_per_token() must give a number above 0, not {count!r}")
    return float(count)


def build_model(config: ModelConfig, vocab_size: int, block_size: int) -> nn.Module:
    """The model that `config` describes, its weights drawn from torch's global generator.

    Args:
        block_size: the most characters that it will see at once; the model has it as `block_size` afterwards.

    Raises:
        CodeError: what a user has registered makes no model.
    """
    model = BUILDERS["model"][config.architecture](config, vocab_size, block_size)
    if not isinstance(model, nn.Module):
        raise CodeError(f"the model {config.architecture} must be an nn.Module, not {type(model).__name__}")
    vars(model).setdefault("block_size", block_size)
    return model


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


__all__ = [
    *("GPT", "SupportsFlopsCount", "SupportsKVCache", "LanguageModel", "Modern", "SupportsCUDAGraphDecode"),
    *("build_model", "count_parameters", "flops_per_token"),
]
