"""Fetch, decode and encode texts once per machine, into a content-addressed cache that is
memory-mapped.

Texts are read in bounded memory: to hash them, to count their characters, to train a BPE tokenizer
on the training parts, and to encode them. A cache directory holds `tokens.bin` and `meta.json` and
is created atomically.
"""

import codecs
import gzip
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mingpt_ddp.config.components import DataConfig
from mingpt_ddp.data.bpe import read_bpe, train_bpe
from mingpt_ddp.data.dataset import EncodedText, split_bounds
from mingpt_ddp.data.download import exists
from mingpt_ddp.data.text_cache import TextCache, digest_of, file_sha256
from mingpt_ddp.data.texts import (
    CHUNK_BYTES,
    GZIP,
    OpenBytes,
    expanded_limit,
    expands_too_far,
    open_source,
    opener,
)
from mingpt_ddp.data.tokenizer import (
    CODE_POINTS,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    tokenizer_from_state,
)
from mingpt_ddp.data.tokenizer_base import code_points
from mingpt_ddp.errors import DataError, UserError
from mingpt_ddp.storage.storage import atomic_write, sync_directory

TRAINED = ("char", "byte", "bpe")  # other values of data.tokenizer are paths


@dataclass(frozen=True)
class Source:
    """A text to encode."""

    config: DataConfig  # data.path is this text
    open: OpenBytes
    sha256: str


def prepare_all(
    config: DataConfig, tokenizer: Tokenizer | None = None, cache: TextCache | None = None
) -> dict[str, EncodedText]:
    """Return the training text as "", and those of `data.val_paths` by name, encoded by its
    tokenizer.

    Args and Raises: as `prepare`.
    """
    cache = cache or TextCache(config)
    try:
        named = (
            config.tokenizer not in TRAINED and tokenizer is not None and exists(config.tokenizer)
        )
        if tokenizer and named and read_bpe(config.tokenizer).state() != tokenizer.state():
            advice = "restore it, or choose another run.name"
            raise DataError(
                f"data.tokenizer={config.tokenizer} differs from that of the snapshot; {advice}"
            )
        encoded = {"": prepare(config, tokenizer, cache)}
        tokenizer = tokenizer_from_state(encoded[""].tokenizer)
        for name, path in (config.val_paths or {}).items():
            text = replace(
                config, path=path, sources=None, val_paths=None, sha256=None, truncate=1.0
            )
            try:
                encoded[name] = prepare(text, tokenizer, cache)
            except DataError as error:
                raise DataError(f"data.val_paths.{name}: {error.args[0]}") from error
    except UserError:
        cache.discard()
        raise
    return encoded


def prepare(
    config: DataConfig, tokenizer: Tokenizer | None = None, cache: TextCache | None = None
) -> EncodedText:
    """Find the text in the cache, or fetch and encode it.

    Args:
        tokenizer: the one of a snapshot; None: that of `data.tokenizer`.
        cache: notes what is added; None: that of `data.cache_dir`.

    Raises:
        ConfigError: the tokenizer needs a library that is not installed.
        DataError: a text cannot be read, has another SHA-256 than `data.sha256`, or cannot be
            encoded; or there are no two distinct characters to learn.
    """
    cache = cache or TextCache(config)
    paths = [path for path, _ in config.sources or ()] or [config.path]
    sources = [_open(replace(config, path=path, sources=None), cache.root) for path in paths]
    sha256 = (
        sources[0].sha256 if len(sources) == 1 else digest_of([source.sha256 for source in sources])
    )
    if tokenizer is None and config.tokenizer not in TRAINED:
        tokenizer = read_bpe(config.tokenizer)
    key = sha256
    # the encoding depends on more than the content
    if splits_texts(config, tokenizer) or tokenizer:
        chosen = tokenizer.state() if tokenizer else [config.tokenizer, config.vocab_size]
        key = digest_of([sha256, chosen, config.truncate, config.train_split, config.test_split])
    directory = cache.directory(key)
    if cached := cache.read(directory, sha256):
        return cached
    with cache.locked():
        if cached := cache.read(directory, sha256):
            return cached
        with cache.adding(directory):
            return _encode(sources, config, tokenizer, directory, sha256)


def splits_texts(config: DataConfig, tokenizer: Tokenizer | None) -> bool:
    """Return whether each text is divided before it is encoded: not if it is one, of characters."""
    return (
        tokenizer.name if tokenizer else config.tokenizer
    ) != CharTokenizer.name or config.sources is not None


def _open(config: DataConfig, cache: Path) -> Source:
    """Find a text and its SHA-256."""
    try:
        open_text = open_source(config, cache, lambda path: _checked_sha256(opener(path), config))
        return Source(config, open_text, _checked_sha256(open_text, config))
    except FileNotFoundError as error:
        raise DataError(f"data.path={config.path}: there is no such file") from error
    except UserError:
        raise
    except Exception as error:  # exceptions differ by protocol
        reason = str(error) or type(error).__name__
        advice = (
            "; without a network, set data.path to a local copy" if "://" in config.path else ""
        )
        raise DataError(f"cannot read data.path={config.path} ({reason[:200]}){advice}") from error


def _checked_sha256(open_bytes: OpenBytes, config: DataConfig) -> str:
    """Return the SHA-256 of a text; raise DataError if it differs from `data.sha256`."""
    sha256 = file_sha256(open_bytes)
    if config.sha256 not in (None, sha256):
        raise DataError(
            f"data.path={config.path} has SHA-256 {sha256}, not data.sha256={config.sha256}; "
            "set data.sha256=null to use it anyway"
        )
    return sha256


def _decode(source: Source) -> Iterator[str]:
    """Yield the text, decompressed and without a byte order mark, in pieces.

    Raises:
        DataError: invalid UTF-8, with the position of the byte, or a damaged gzip file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    path = source.config.path
    position = 0
    at_start = True
    with source.open() as raw:
        zipped = raw.peek(2)[:2] == GZIP  # which is invalid UTF-8
        stream: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
        limit = (
            expanded_limit(os.fstat(raw.fileno()).st_size, source.config.max_expansion)
            if zipped
            else math.inf
        )
        while True:
            try:
                chunk = stream.read(CHUNK_BYTES)
                position += len(chunk)
                if position > limit:
                    raise expands_too_far(path, int(limit))
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # the chunk ends at the end of the decoder's input
                at = position - len(error.object) + error.start
                raise DataError(
                    f"data.path={path} is not UTF-8 at byte {at}; convert it with iconv"
                ) from error
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"data.path={path} is not a whole gzip file: {error}") from error
            if at_start and text:
                text = text.removeprefix("\ufeff")
                at_start = False
            yield text
            if not chunk:
                return


def _between(source: Source, begin: int, end: int) -> Iterator[str]:
    """Yield the characters begin .. end - 1 of a text, in pieces."""
    position = 0
    for text in _decode(source) if end > begin else ():
        if part := text[max(0, begin - position) : max(0, end - position)]:
            yield part
        position += len(text)
        if position >= end:
            return


def _count(sources: list[Source]) -> tuple[list[int], str]:
    """Return the number of characters of each text, and the distinct ones of all in code-point
    order.
    """
    seen = np.zeros(CODE_POINTS, dtype=bool)
    lengths = []
    for source in sources:
        lengths.append(0)
        for text in _decode(source):
            seen[code_points(text)] = True
            lengths[-1] += len(text)
        if lengths[-1] == 0:
            raise DataError(f"data.path={source.config.path} is empty")
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def _encode(
    sources: list[Source],
    config: DataConfig,
    tokenizer: Tokenizer | None,
    directory: Path,
    sha256: str,
) -> EncodedText:
    """Write the tokens and their description to `directory`, atomically: all training parts, then
    the other splits.
    """
    lengths, distinct = _count(sources)
    divided = splits_texts(config, tokenizer)
    bounds = [split_bounds(length, config) for length in lengths] if divided else [[0, lengths[0]]]
    splits = [
        [(s, b[i], b[i + 1]) for s, b in zip(sources, bounds, strict=True)]
        for i in range(len(bounds[0]) - 1)
    ]
    if tokenizer is None:
        if len(distinct) < 2:
            raise DataError(
                f"data.path={sources[0].config.path} has one distinct character; there is "
                "nothing to learn"
            )
        training = chain.from_iterable(_between(*part) for part in splits[0])
        tokenizer = {
            "char": lambda: CharTokenizer(distinct),
            "byte": ByteTokenizer,
            "bpe": lambda: train_bpe(training, config.vocab_size),
        }[config.tokenizer]()
    # the smallest unsigned type that holds every token
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    sizes: list[list[int]] = []
    with tempfile.TemporaryDirectory(
        prefix=".partial-", dir=directory.parent, ignore_cleanup_errors=True
    ) as name:
        tokens = Path(name) / "tokens.bin"
        with open(tokens, "wb") as file:
            for split in splits:
                sizes.append([])
                for part in split:
                    begin = file.tell()
                    for piece in tokenizer.encode_stream(_between(*part)):
                        file.write(piece.astype(dtype, copy=False).tobytes())
                    sizes[-1].append((file.tell() - begin) // dtype.itemsize)
            file.flush()
            os.fsync(file.fileno())
        for source in sources:
            if file_sha256(source.open) != source.sha256:
                raise DataError(
                    f"data.path={source.config.path} changed while being read; run again"
                )
        length = sum(map(sum, sizes))
        parts = sizes if divided else []
        digest = file_sha256(opener(tokens))
        encoded = EncodedText(
            str(directory), sha256, length, tokenizer.state(), str(dtype), digest, parts
        )
        meta = {key: value for key, value in asdict(encoded).items() if key != "directory"}
        content = {"text": meta, "digest": digest_of(meta)}
        atomic_write(Path(name) / "meta.json", json.dumps(content).encode())
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one
        os.replace(name, directory)
        sync_directory(directory.parent)
    return encoded
