"""What is read and encoded of a text, and decoded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state


def prepare(config: DataConfig, cache: TextCache | None = None) -> EncodedText:
    return prepare_all(config, cache=cache)[""]


def text_of(config: DataConfig) -> str:
    encoded = prepare(config)
    tokens = np.fromfile(Path(encoded.directory) / "tokens.bin", encoded.dtype)
    return tokenizer_from_state(encoded.tokenizer).decode(tokens.tolist())
