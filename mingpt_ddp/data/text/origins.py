"""Find the documents that tokens of a training text come from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.rng import Ints
from mingpt_ddp.data.text.encode import SOURCES
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.data.tokens.token_files import cut
from mingpt_ddp.errors import DataError

# Add up the sizes of this many tokens in one call, to bound the memory.
TOKENS_PER_SUM = 1 << 20


@dataclass(frozen=True)
class Origin:
    """A place in a document of the training text.

    Attributes:
        file: Name of the file.
        document: Number of the line, row or object in the file, or 0 if the file is one document.
        byte: Offset in the document, in bytes of UTF-8. In a file of tokens, offset in the file.
    """

    file: str
    document: int
    byte: int


def find_origins(
    text: EncodedText, cache: TextCache, starts: Ints, length: int
) -> list[list[Origin]]:
    """Find the documents that windows of the training tokens come from.

    Args:
        text: The encoded text.
        cache: The cache that holds the text. A file of tokens is not in it.
        starts: Position of the first token of each window.
        length: Number of tokens in a window.

    Returns:
        For each window, the place in a document where the window begins, and the start of each
        further document in it.

    Raises:
        DataError: The cache has lost the text since it was opened.
    """
    if text.files:
        parts = [cut(text.files, start, start + length) for start in starts.tolist()]
        return [[Origin(part.path, 0, part.offset) for part in window] for window in parts]
    directory = Path(text.directory)
    entry = cache.find(directory)
    if entry is None:
        raise DataError(f"the encoded text in {directory} has been deleted; run again")
    # Rows of first token, file, document and byte, as data/text/encode.py writes them.
    table = np.fromfile(directory / SOURCES, np.int64).reshape(-1, 4)
    tokens = text.memmap()
    sizes = tokenizer_from_state(text.tokenizer).token_sizes
    windows = []
    for start in starts.tolist():
        first = int(np.searchsorted(table[:, 0], start, side="right")) - 1
        end = int(np.searchsorted(table[:, 0], start + length))
        origins = []
        for token, file, document, byte in table[first:end].tolist():
            # In the first document, add the bytes between its first token and the window.
            for begin in range(token, start, TOKENS_PER_SUM):
                byte += int(sizes[tokens[begin : min(start, begin + TOKENS_PER_SUM)]].sum())
            origins.append(Origin(entry.files[file], document, byte))
        windows.append(origins)
    return windows
