"""The architectures, by the name that `model.architecture` selects, and what the rest of the package asks of one.

Shapes: B sequences, T characters, T <= block_size, V = vocab_size.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt_ddp.errors import CodeError
from mingpt_ddp.groups import ModelConfig
from mingpt_ddp.model.gpt import GPT
from mingpt_ddp.registry import BUILDERS

BUILDERS["model"]["gpt"] = GPT


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
class Decoder(Protocol):
    """What a model may have besides, so that sampling need not read the whole context for every character."""

    def new_cache(self, batch: int, dtype: torch.dtype) -> Any:
        """Room for what the model keeps of the characters of `batch` sequences."""

    def decode(self, tokens: Tensor, cache: Any, start: int) -> Tensor:
        """Logits (B, V) behind the last of the new `tokens` (B, T), which follow `start` characters in the cache."""


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


__all__ = ["GPT", "Decoder", "LanguageModel", "build_model", "count_parameters"]
