"""The encoded text on disk, split into training and validation tokens."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.data.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError


@dataclass(frozen=True)
class EncodedText:
    """An encoded text on disk, described by JSON values that ranks can exchange."""

    directory: str
    sha256: str  # of the source's bytes, before decompression
    length: int  # tokens
    tokenizer: dict[str, Any]  # the state of the tokenizer
    dtype: str  # of a token on disk
    tokens_sha256: str  # of tokens.bin
    # tokens by split and source; []: split by the configuration
    parts: list[list[int]] = field(default_factory=list)


def split_bounds(length: int, config: DataConfig) -> list[int]:
    """Return where the training, validation and test part of `length` tokens or characters begin,
    and the end.
    """
    n = int(length * config.truncate)
    return [0, int(n * config.train_split), n - int(n * config.test_split), n]


class TextDataset:
    """The tokens, memory-mapped and split without overlap: `train`, then `val`, then `test`, which
    may be empty.
    """

    def __init__(self, encoded: EncodedText, config: DataConfig) -> None:
        self.tokenizer = tokenizer_from_state(encoded.tokenizer)
        tokens: Any = np.memmap(
            Path(encoded.directory) / "tokens.bin", dtype=encoded.dtype, mode="r"
        )
        sizes = [sum(split) for split in encoded.parts]
        bounds = [0, *accumulate(sizes)] if sizes else split_bounds(encoded.length, config)
        self.whole = tokens[: bounds[-1]]
        self.train, self.val, self.test = (tokens[begin:end] for begin, end in pairwise(bounds))
        self.train_sizes = encoded.parts[0] if sizes else [len(self.train)]  # of each source

    def check_lengths(self, block_size: int) -> None:
        """Refuse a text that no model can be trained on.

        Raises:
            DataError: the training part is shorter than one window, or the validation part than one
                prediction.
        """
        if len(self.train) < block_size + 1:
            raise DataError(
                f"the training text has {len(self.train)} tokens, one window needs "
                "data.block_size + 1 = "
                f"{block_size + 1}; use a longer text or a smaller data.block_size"
            )
        if len(self.val) < 2:
            raise DataError(
                f"the validation text has {len(self.val)} tokens, too few; lower data.train_split"
            )
