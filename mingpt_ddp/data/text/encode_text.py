"""Decode texts and encode them into a cache directory of `tokens.bin` and `meta.json`.

Texts are read in bounded memory: to count their characters, to train a BPE tokenizer on the
training parts, and to encode them. The directory is created atomically.
"""

import codecs
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.content import BINARY, NOT_UTF8, kind_of
from mingpt_ddp.data.dataset import EncodedText, split_bounds
from mingpt_ddp.data.file_records import digest_of
from mingpt_ddp.data.text.archives import (
    DAMAGES,
    decompressed,
    expanded_limit,
    expands_too_far,
)
from mingpt_ddp.data.text.contents import refusal
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.text.texts import CHUNK_BYTES, Text
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
class Source:
    """A text to encode."""

    config: DataConfig  # its path is this text
    text: Text
    sha256: str
    check_unchanged: Callable[[], None]  # reads it again
    split: str = ""  # all of it: train, val or test; "": it is divided


@dataclass(frozen=True)
class Part:
    """The characters begin .. end - 1 of a text."""

    source: Source
    begin: int
    end: int


def is_divided(sources: list[Source], config: DataConfig, tokenizer: Tokenizer | None) -> bool:
    """Return whether each text is divided before it is encoded: not if it is one, of characters."""
    name = tokenizer.name if tokenizer else config.tokenizer
    return name != CharTokenizer.name or bool(config.sources) or len(sources) > 1


def encode(
    sources: list[Source],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    directory: Path,
    sha256: str,
    cache: TextCache,
) -> EncodedText:
    """Write the tokens and their description to a directory of the cache, atomically.

    All training parts come first, then the other splits.
    """
    lengths, distinct = _count(sources)
    divided = is_divided(sources, config, tokenizer)
    splits = [[Part(sources[0], 0, lengths[0])]]
    if divided:
        splits = divide(sources, lengths, config)
    if tokenizer is None:
        if len(distinct) < 2:
            raise DataError(
                f"{sources[0].config.source} has one distinct character; there is nothing to learn"
            )
        tokenizer = _make_tokenizer(config, distinct, splits[0])
        if config.end_token:
            tokenizer = tokenizer.with_end()
    # the smallest unsigned type that holds every token
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with tempfile.TemporaryDirectory(
        prefix=".partial-", dir=directory.parent, ignore_cleanup_errors=True
    ) as name:
        tokens = Path(name) / "tokens.bin"
        sizes = _write_tokens(tokens, splits, tokenizer, dtype)
        for source in sources:
            source.check_unchanged()
        encoded = EncodedText(
            directory=str(directory),
            sha256=sha256,
            length=sum(map(sum, sizes)),
            tokenizer=tokenizer.state(),
            dtype=str(dtype),
            tokens_sha256=cache.hash_new(tokens, directory),
            parts=sizes if divided else [],
            form=sources[0].text.form,
        )
        meta = asdict(encoded)
        del meta["directory"]
        content = {"text": meta, "digest": digest_of(meta)}
        atomic_write(Path(name) / "meta.json", json.dumps(content).encode())
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one
        os.replace(name, directory)
        sync_directory(directory.parent)
    return encoded


def _make_tokenizer(config: DataConfig, distinct: str, training: list[Part]) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names, learnt from the training parts.

    Args:
        distinct: the characters of the texts.
    """
    if config.tokenizer == "char":
        return CharTokenizer(distinct)
    if config.tokenizer == "byte":
        return ByteTokenizer()
    texts = chain.from_iterable(map(_read, training))
    size = config.vocab_size or DEFAULT_VOCAB_SIZE
    return train_bpe(texts, size - config.end_token)


def _write_tokens(
    path: Path, splits: list[list[Part]], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> list[list[int]]:
    """Write the tokens of all parts, one after the other; return how many, by split and text."""
    sizes = []
    with open(path, "wb") as file:
        for split in splits:
            of_split = []
            for part in split:
                begin = file.tell()
                for tokens in tokenizer.encode_stream(_read(part)):
                    file.write(tokens.astype(dtype, copy=False).tobytes())
                of_split.append((file.tell() - begin) // dtype.itemsize)
            sizes.append(of_split)
        file.flush()
        os.fsync(file.fileno())
    return sizes


def _decode(source: Source) -> Iterator[str]:
    """Yield the text of a source in pieces.

    With `data.end_token` a piece END follows each document. Without it a record ends with a line
    feed, as joined files do.

    Raises:
        DataError: as `_decode_bytes` and `_chunks`, or a record cannot be read.
    """
    text = source.text
    ends = source.config.end_token
    if text.open is None and text.records is not None:
        yield from _gathered(_records(text.records(), ends))
        return
    chunks = text.records() if ends and text.records else _chunks(source)
    for piece in _decode_bytes(source, chunks):
        if piece or ends:
            yield piece or END


def _records(records: Iterator[str], ends: bool) -> Iterator[str]:
    for record in records:
        yield record
        if ends:
            yield END
        elif not record.endswith("\n"):
            yield "\n"


def _gathered(pieces: Iterator[str]) -> Iterator[str]:
    """Join short pieces, so that what follows costs little for each record."""
    gathered: list[str] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield "".join(gathered)
            gathered = []
            size = 0
    yield "".join(gathered)


def _decode_bytes(source: Source, chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield documents of UTF-8 in pieces without a byte order mark, and "" after each.

    Args:
        chunks: an empty one follows each document.

    Raises:
        DataError: invalid UTF-8, with the position of the byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    name = source.config.source
    position = 0
    at_start = True
    for chunk in chunks:
        position += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            kind = kind_of(chunk) if at_start else None
            if kind not in (None, NOT_UTF8, BINARY):
                raise refusal(name, kind) from error
            # what the decoder was given ends where the chunk ends
            at = position - len(error.object) + error.start
            raise DataError(f"{name} is not UTF-8 at byte {at}; {NOT_UTF8.advice}") from error
        if at_start and text:
            text = text.removeprefix("\ufeff")
            at_start = False
        if text:
            yield text
        if not chunk:
            yield ""


def _chunks(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a source, decompressed, and an empty piece at the end.

    Raises:
        DataError: a damaged gzip file, or one that expands too far.
    """
    assert source.text.open is not None
    name = source.config.source
    position = 0
    with source.text.open() as raw:
        limit = math.inf
        if (stream := decompressed(raw)) is not raw:
            size = os.fstat(raw.fileno()).st_size
            limit = expanded_limit(size, source.config.max_expansion)
        chunk = b"begin"
        while chunk:
            try:
                chunk = stream.read(CHUNK_BYTES)
            except DAMAGES as error:
                raise DataError(f"{name} is not a whole compressed file: {error}") from error
            position += len(chunk)
            if position > limit:
                raise expands_too_far(name, int(limit))
            yield chunk


def _read(part: Part) -> Iterator[str]:
    """Yield a part of a text, in pieces."""
    if part.end <= part.begin:
        return
    position = 0
    for text in _decode(part.source):
        piece = text[max(0, part.begin - position) : max(0, part.end - position)]
        if piece:
            yield piece
        position += len(text)
        if position >= part.end:
            return


def _count(sources: list[Source]) -> tuple[list[int], str]:
    """Return the number of characters of each text, and the distinct ones in code-point order.

    The end of a document counts as one character, so that all tokenizers divide a text alike.
    """
    seen = np.zeros(CODE_POINTS, dtype=bool)
    lengths = []
    for source in sources:
        length = 0
        is_empty = True
        for text in _decode(source):
            seen[code_points(text)] = True
            length += len(text)
            is_empty = is_empty and not text.strip(END)
        if is_empty:
            raise DataError(f"{source.config.source} is empty")
        lengths.append(length)
    seen[ord(END)] = False
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def divide(sources: list[Source], lengths: list[int], config: DataConfig) -> list[list[Part]]:
    """Return the training, the validation and the test parts of all texts.

    `data.truncate` shortens those to train on.

    Raises:
        DataError: nothing is left of them.
    """
    splits: dict[str, list[Part]] = {"train": [], "val": [], "test": []}
    is_left = False
    for source, length in zip(sources, lengths, strict=True):
        bounds = split_bounds(length, config)
        if source.split in ("", "train") and bounds[-1]:
            is_left = True
        if source.split:
            end = bounds[-1] if source.split == "train" else length
            splits[source.split].append(Part(source, 0, end))
            continue
        for split, (begin, end) in zip(splits.values(), pairwise(bounds), strict=True):
            split.append(Part(source, begin, end))
    if not is_left:
        raise DataError(f"data.truncate={config.truncate} leaves nothing to train on; raise it")
    return [*splits.values()]
