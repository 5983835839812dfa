"""The tokens of a text on disk, split into training, validation and test tokens."""

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig, TextFormat
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.data.tokens.shards import Shards
from mingpt_ddp.data.tokens.token_files import TokenFile
from mingpt_ddp.errors import DataError


@dataclass(frozen=True)
class EncodedText:
    """An encoded text on disk, described by JSON values that ranks can exchange.

    Attributes:
        directory: The text's directory in the cache.
        sha256: SHA-256 of the source's bytes, before decompression.
        length: Number of tokens.
        tokenizer: State of the tokenizer.
        dtype: Type of a token on disk.
        tokens_sha256: SHA-256 of tokens.bin, or "" if the tokens are in token files.
        parts: For each split, the number of tokens from each source. Empty if the whole text was
            encoded at once. The configuration then splits it by position.
        form: The format in which the source was read, as data.format. It is never auto.
        notes: Lines for the log, which say how each text was read.
        files: The token files that hold the tokens of these parts. Empty if tokens.bin holds them.
    """

    directory: str
    sha256: str
    length: int
    tokenizer: dict[str, Any]
    dtype: str
    tokens_sha256: str
    parts: list[list[int]] = field(default_factory=list)
    form: TextFormat = "text"
    notes: list[str] = field(default_factory=list)
    files: list[TokenFile] = field(default_factory=list)

    def memmap(self) -> Any:
        """Map the tokens to memory: as an array, or as Shards if there are several token files."""
        if len(self.files) > 1:
            return Shards(self.files, self.dtype)
        if self.files:
            return self.files[0].memmap()
        return np.memmap(Path(self.directory) / "tokens.bin", dtype=self.dtype, mode="r")


@dataclass(frozen=True)
class RecordedText:
    """The training text that a snapshot has recorded.

    A resumed run reads its texts in the recorded format, even if a new run would choose
    another format.

    Attributes:
        sha256: SHA-256 of the text.
        form: The format in which the text was read, as data.format.
    """

    sha256: str
    form: TextFormat = "text"


def split_bounds(length: int, config: DataConfig) -> list[int]:
    """Compute where the training, validation and test parts of a text begin, and where it ends.

    Args:
        length: Length of the text, in tokens or characters.
        config: Its data.truncate shortens the text from the end.
    """
    n = int(length * config.truncate)
    return [0, int(n * config.train_split), n - int(n * config.test_split), n]


class TextDataset:
    """The memory-mapped tokens of a text, split without overlap.

    Attributes:
        tokenizer: The tokenizer that made the tokens.
        whole: All tokens, in the order train, val, test.
        train: The training tokens.
        val: The validation tokens.
        test: The test tokens, of which there may be none.
        train_sizes: Number of training tokens from each source.
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
        self.train_sizes = encoded.parts[0] if encoded.parts else [train_end]

    def check_lengths(self, block_size: int) -> None:
        """Refuse a text that is too short to train or to validate a model.

        Args:
            block_size: Number of tokens in a sequence. A window has one more.

        Raises:
            DataError: The training part is shorter than one window, or the validation part has
                fewer than two tokens.
        """
        if len(self.train) < block_size + 1:
            raise DataError(
                f"the training text has {len(self.train)} tokens, but one window needs "
                f"data.block_size + 1 = {block_size + 1}; use a longer text or a smaller "
                "data.block_size"
            )
        if len(self.val) < 2:
            raise DataError(
                f"the validation text has {len(self.val)} tokens, but at least 2 are needed; lower "
                "data.train_split, or give a longer text"
            )
