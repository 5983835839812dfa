"""The architectures, by the name that `model.architecture` selects."""

from __future__ import annotations

from typing import Any

from mingpt_ddp.model.gpt import GPT

ARCHITECTURES: dict[str, type[GPT]] = {"gpt": GPT}


def build_model(config: Any, vocab_size: int, block_size: int) -> GPT:
    """The model that `config` describes, its weights drawn from torch's global generator."""
    return ARCHITECTURES[config.architecture](config, vocab_size, block_size)


__all__ = ["ARCHITECTURES", "GPT", "build_model"]
