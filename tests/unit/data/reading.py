"""What has been encoded, decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.data.prepare import prepare
from mingpt_ddp.data.tokenizer import tokenizer_from_state


def text_of(config: DataConfig) -> str:
    encoded = prepare(config)
    tokens = np.fromfile(Path(encoded.directory) / "tokens.bin", encoded.dtype)
    return tokenizer_from_state(encoded.tokenizer).decode(tokens.tolist())
