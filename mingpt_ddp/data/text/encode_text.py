"""Encode texts into a cache directory of `tokens.bin` and `meta.json`.

Texts are read in bounded memory: to count their characters, to train a BPE tokenizer on the
training parts, and to encode them. The directory is created atomically.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText, split_bounds
from mingpt_ddp.data.known_files import digest_of
from mingpt_ddp.data.text.opened_text import Text, sha256_of_all
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.bpe import DEFAULT_VOCAB_SIZE, train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import (
    CODE_POINTS,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)
from mingpt_ddp.data.tokenizers.tokenizer_base import END, code_points
from mingpt_ddp.errors import DataError
from mingpt_ddp.storage.storage import atomic_write, sync_directory


@dataclass(frozen=True)
class TextRange:
    """The characters, or tokens, begin .. end - 1 of a text."""

    text: Text
    begin: int
    end: int


def is_divided(texts: list[Text], config: DataConfig, tokenizer: Tokenizer | None) -> bool:
    """Return whether each text is divided before it is encoded: not if it is one, of characters."""
    name = tokenizer.name if tokenizer else config.tokenizer
    return name != CharTokenizer.name or bool(config.sources) or len(texts) > 1


def encode(
    texts: list[Text],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    cache: TextCache,
    directory: Path,
) -> EncodedText:
    """Write the tokens and their description to a directory of the cache, atomically.

    All training parts come first, then the other splits.
    """
    lengths, distinct = _count(texts)
    divided = is_divided(texts, config, tokenizer)
    splits = [[TextRange(texts[0], 0, lengths[0])]]
    if divided:
        splits = divide(texts, lengths, config)
    if tokenizer is None:
        if len(distinct) < 2:
            raise DataError(
                f"{texts[0].source} has one distinct character; there is nothing to learn"
            )
        tokenizer = _make_tokenizer(config, distinct, splits[0])
        if config.end_token:
            tokenizer = tokenizer.with_end()
    # Choose the smallest unsigned type that holds every token.
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with tempfile.TemporaryDirectory(
        prefix=".partial-", dir=directory.parent, ignore_cleanup_errors=True
    ) as name:
        tokens = Path(name) / "tokens.bin"
        sizes = _write_tokens(tokens, splits, tokenizer, dtype)
        for text in texts:
            cache.check_unchanged(text)
        encoded = EncodedText(
            directory=str(directory),
            sha256=sha256_of_all(texts),
            length=sum(map(sum, sizes)),
            tokenizer=tokenizer.state(),
            dtype=str(dtype),
            tokens_sha256=cache.hash_new(tokens, directory),
            parts=sizes if divided else [],
            form=texts[0].form,
        )
        meta = asdict(encoded)
        del meta["directory"]
        content = {"text": meta, "digest": digest_of(meta)}
        atomic_write(Path(name) / "meta.json", json.dumps(content).encode())
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one
        os.replace(name, directory)
        sync_directory(directory.parent)
    return encoded


def _make_tokenizer(config: DataConfig, distinct: str, training: list[TextRange]) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names, learnt from the training parts.

    Args:
        distinct: the characters of the texts.
    """
    if config.tokenizer == "char":
        return CharTokenizer(distinct)
    if config.tokenizer == "byte":
        return ByteTokenizer()
    pieces = chain.from_iterable(map(_read, training))
    size = config.vocab_size or DEFAULT_VOCAB_SIZE
    return train_bpe(pieces, size - config.end_token)


def _write_tokens(
    path: Path, splits: list[list[TextRange]], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> list[list[int]]:
    """Write the tokens of all parts, one after the other; return how many, by split and text."""
    sizes = []
    with open(path, "wb") as file:
        for split in splits:
            lengths = []
            for part in split:
                begin = file.tell()
                for tokens in tokenizer.encode_stream(_read(part)):
                    file.write(tokens.astype(dtype, copy=False).tobytes())
                lengths.append((file.tell() - begin) // dtype.itemsize)
            sizes.append(lengths)
        file.flush()
        os.fsync(file.fileno())
    return sizes


def _read(part: TextRange) -> Iterator[str]:
    """Yield a part of a text, in pieces."""
    if part.end <= part.begin:
        return
    position = 0
    for piece in part.text.read():
        inside = piece[max(0, part.begin - position) : max(0, part.end - position)]
        if inside:
            yield inside
        position += len(piece)
        if position >= part.end:
            return


def _count(texts: list[Text]) -> tuple[list[int], str]:
    """Return the number of characters of each text, and the distinct ones in code-point order.

    The end of a document counts as one character, so that all tokenizers divide a text alike.
    """
    seen = np.zeros(CODE_POINTS, dtype=bool)
    lengths = []
    for text in texts:
        length = 0
        is_empty = True
        for piece in text.read():
            seen[code_points(piece)] = True
            length += len(piece)
            is_empty = is_empty and not piece.strip(END)
        if is_empty:
            raise DataError(f"{text.source} is empty")
        lengths.append(length)
    seen[ord(END)] = False
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def divide(texts: list[Text], lengths: list[int], config: DataConfig) -> list[list[TextRange]]:
    """Return the training, the validation and the test parts of all texts.

    `data.truncate` shortens those to train on.

    Raises:
        DataError: nothing is left of them.
    """
    splits: dict[str, list[TextRange]] = {"train": [], "val": [], "test": []}
    is_left = False
    for text, length in zip(texts, lengths, strict=True):
        bounds = split_bounds(length, config)
        if text.split in ("", "train") and bounds[-1]:
            is_left = True
        if text.split:
            end = bounds[-1] if text.split == "train" else length
            splits[text.split].append(TextRange(text, 0, end))
            continue
        for split, (begin, end) in zip(splits.values(), pairwise(bounds), strict=True):
            split.append(TextRange(text, begin, end))
    if not is_left:
        raise DataError(f"data.truncate={config.truncate} leaves nothing to train on; raise it")
    return [*splits.values()]
