"""The encoded text on disk, or token files, split into training and validation tokens."""

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig, Form
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.data.tokens.shards import Shards
from mingpt_ddp.data.tokens.token_files import TokenFile
from mingpt_ddp.errors import DataError


@dataclass(frozen=True)
class EncodedText:
    """An encoded text on disk, described by JSON values that ranks can exchange."""

    directory: str
    sha256: str  # of the source's bytes, before decompression
    length: int  # tokens
    tokenizer: dict[str, Any]  # the state of the tokenizer
    dtype: str  # of a token on disk
    tokens_sha256: str  # of tokens.bin; "" of token files
    # Numbers of tokens by split and source; []: the configuration splits.
    parts: list[list[int]] = field(default_factory=list)
    form: Form = "text"  # in which the source was read, as data.format; never auto
    notes: list[str] = field(default_factory=list)  # for the log: how each text is read
    # The files with the tokens of these parts; []: tokens.bin has them.
    files: list[TokenFile] = field(default_factory=list)

    def memmap(self) -> Any:
        """Return the tokens, memory-mapped: an array, or Shards of several files."""
        if len(self.files) > 1:
            return Shards(self.files, self.dtype)
        if self.files:
            return self.files[0].memmap()
        return np.memmap(Path(self.directory) / "tokens.bin", dtype=self.dtype, mode="r")


@dataclass(frozen=True)
class RecordedText:
    """The training text of a snapshot, which goes on with its texts, whatever they look like."""

    sha256: str
    form: Form = "text"


def split_bounds(length: int, config: DataConfig) -> list[int]:
    """Return where the training, validation and test part of a text begin, and the end.

    Args:
        length: of the text, in tokens or characters.
    """
    n = int(length * config.truncate)
    return [0, int(n * config.train_split), n - int(n * config.test_split), n]


class TextDataset:
    """The tokens, memory-mapped and split without overlap: `train`, `val`, then `test`.

    The latter may be empty.
    """

    def __init__(self, encoded: EncodedText, config: DataConfig) -> None:
        self.tokenizer = tokenizer_from_state(encoded.tokenizer)
        tokens = encoded.memmap()
        bounds = split_bounds(encoded.length, config)
        if encoded.parts:
            bounds = [0, *accumulate(map(sum, encoded.parts))]
        _, train_end, val_end, end = bounds
        self.whole = tokens[:end]
        self.train = tokens[:train_end]
        self.val = tokens[train_end:val_end]
        self.test = tokens[val_end:end]
        self.train_sizes = encoded.parts[0] if encoded.parts else [train_end]  # of each source

    def check_lengths(self, block_size: int) -> None:
        """Refuse a text that no model can be trained on.

        Raises:
            DataError: the training part is shorter than one window, or the validation part than one
                prediction.
        """
        if len(self.train) < block_size + 1:
            raise DataError(
                f"the training text has {len(self.train)} tokens, one window needs "
                f"data.block_size + 1 = {block_size + 1}; use a longer text or a smaller "
                "data.block_size"
            )
        if len(self.val) < 2:
            raise DataError(
                f"the validation text has {len(self.val)} tokens, too few; lower "
                "data.train_split, or give a longer one"
            )
