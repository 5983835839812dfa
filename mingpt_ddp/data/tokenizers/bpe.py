"""Byte-level BPE by the `tokenizers` library, which is imported only to train and to encode.

A tokenizer is its JSON in the library's format. Only one that inverts exactly is taken: BPE on
bytes, without a normalizer. Its size is bounded, and what this module needs of it is checked.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints
from mingpt_ddp.data.tokenizers.tokenizer_base import (
    END,
    END_NAME,
    END_NAMES,
    EXACT,
    Tokenizer,
    begins_character,
    decode_bytes,
    utf8,
)
from mingpt_ddp.errors import ConfigError, DataError

MAX_JSON_CHARS = 1 << 23  # a state.json may have 16 MiB
DEFAULT_VOCAB_SIZE = 4096
CHUNK_CHARS = 1 << 16  # encoded by one thread
CHUNKS = 16  # encoded at a time, by all cores
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# GPT-2's name of each byte: its Latin-1 character if that is printable, else one from U+0100 on.
BYTE_NAMES = [chr(byte if byte in PRINTABLE else 256 + OTHERS.index(byte)) for byte in range(256)]
LOSSY_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
# Behaviours of a Split in tokenizer.json.
LOSSLESS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class BPETokenizer(Tokenizer):
    """Byte-level BPE. Tokens are byte sequences; decoding needs no library."""

    name = "bpe"

    def __init__(self, text: str, end: int | None = None) -> None:
        """
        Args:
            text: the tokenizer's JSON.
            end: id of the special token that ends a document; then special tokens in a text are
                characters as any others.

        Raises:
            LookupError, TypeError, ValueError: it is not a byte-level BPE that inverts exactly.
        """
        values = _checked(text)
        kept = {**values, "truncation": None, "padding": None}
        self.json = json.dumps(kept, separators=(",", ":"), sort_keys=True)
        _check_length(self.json)  # in ASCII it may be longer than it was
        self.tokens = _bytes_of_tokens(values)
        self.line_feed = self.tokens.index(b"\n")
        self.end = end
        if end is not None:
            self.tokens[end] = b""
        self.token_sizes = np.array([len(token) for token in self.tokens])
        characters = [int(begins_character(token).sum()) for token in self.tokens]
        self.token_characters = np.array(characters)
        self._encoder: Any = None

    def with_end(self) -> Tokenizer:
        if self.end is not None:
            return self
        values = json.loads(self.json)
        added = {token["content"]: token for token in values.get("added_tokens") or ()}
        ids = values["model"]["vocab"] | {name: token["id"] for name, token in added.items()}
        name = next((name for name in END_NAMES if name in ids), END_NAME)
        end = ids.get(name, self.vocab_size)
        added[name] = {"id": end, "content": name, **EXACT, "special": True}
        values["added_tokens"] = [*added.values()]
        return BPETokenizer(json.dumps(values), end)

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            ConfigError: the library is not installed.
            DataError: the library refuses the tokenizer or the text.
        """
        [encoding] = self._encode([utf8(text).decode()])
        return list(encoding.ids)

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        """Yield the tokens of a text, encoded by all cores; the same ones on any number of them."""
        chunks = split_at_words(texts)
        while batch := list(islice(chunks, CHUNKS)):
            pieces: list[str] = []
            is_last: list[bool] = []  # of its document
            for chunk in batch:
                parts = chunk.split(END)
                pieces += parts
                is_last += [True] * (len(parts) - 1) + [False]
            tokens: list[int] = []
            for encoding, ends in zip(self._encode(pieces), is_last, strict=True):
                tokens += encoding.ids
                if ends and self.end is not None:
                    tokens.append(self.end)
            yield np.array(tokens, dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return decode_bytes(b"".join(self.tokens[token] for token in tokens))

    def state(self) -> dict[str, Any]:
        end = {} if self.end is None else {"end_token": self.end}
        return {"tokenizer": {"type": "bpe", "json": self.json, **end}}

    def _encode(self, texts: list[str]) -> list[Any]:
        """Return the library's encoding of each text."""
        encoder = self._library()
        try:
            with _panics_raised():
                return list(encoder.encode_batch_fast(texts, add_special_tokens=False))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"the tokenizer cannot encode the text: {str(error)[:200]}; use another "
                "data.tokenizer"
            ) from error

    def _library(self) -> Any:
        """Return the library's tokenizer, made at the first call."""
        if self._encoder is not None:
            return self._encoder
        lib = library()
        try:
            with _panics_raised():
                self._encoder = lib.Tokenizer.from_str(self.json)
            self._encoder.encode_special_tokens = self.end is not None
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"the library tokenizers refuses the tokenizer: {str(error)[:200]}"
            ) from error
        # the library numbers them in their order
        for token in json.loads(self.json).get("added_tokens") or ():
            if self._encoder.token_to_id(token["content"]) != token["id"]:
                raise DataError(
                    "the library tokenizers gives the added token "
                    f"{token['content']!r:.50} another id"
                )
        return self._encoder


def library() -> Any:
    """Import `tokenizers`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "a BPE tokenizer needs tokenizers; pip install 'mingpt_ddp[tokenizers]', or use "
            "data.tokenizer=char or byte"
        ) from error
    return tokenizers


@contextlib.contextmanager
def _panics_raised() -> Iterator[None]:
    """Raise a panic of the library as a ValueError, without the backtrace that it prints.

    PyO3's PanicException is no Exception.
    """
    try:
        with _silent_stderr():
            yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what this process writes to file descriptor 2."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def train_bpe(texts: Iterator[str], vocab_size: int) -> BPETokenizer:
    """Learn merges from the documents of a text; a small text may give fewer tokens."""
    lib = library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chunks = split_at_words(texts)
    tokenizer.train_from_iterator((part for chunk in chunks for part in chunk.split(END)), trainer)
    return BPETokenizer(tokenizer.to_str())


def split_at_words(texts: Iterator[str]) -> Iterator[str]:
    """Yield a text in chunks, cut before a space between two letters, where pre-tokenizers cut too.

    A chunk without such a space ends at CHUNK_CHARS. The chunks depend on the text alone.
    """
    rest = ""
    for text in texts:
        rest += text
        while len(rest) > CHUNK_CHARS:
            cut = CHUNK_CHARS
            for match in BETWEEN_WORDS.finditer(rest, CHUNK_CHARS // 2, CHUNK_CHARS):
                cut = match.start()
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _checked(text: str) -> dict[str, Any]:
    """Return the values of a tokenizer's JSON, which must invert exactly."""
    _check_length(text)
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not _is_lossless(values):
        raise ValueError("it does not decode to exactly what it has encoded, or is not byte-level")
    return dict(values)


def _check_length(text: str) -> None:
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"it has more than {MAX_JSON_CHARS:,} characters")


def _is_lossless(values: dict[str, Any]) -> bool:
    """Return whether a tokenizer is a byte-level BPE that decodes to exactly what it encodes."""
    model = values["model"]
    first = values["pre_tokenizer"]
    steps = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    *before, last = steps
    added = values.get("added_tokens") or ()
    return (
        model["type"] == "BPE"
        and not any(model.get(key) for key in LOSSY_OPTIONS)
        and values.get("normalizer") is None
        and last["type"] == "ByteLevel"
        and not any(step.get("add_prefix_space") for step in steps)
        and all(map(_keeps_all, before))
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    )


def _keeps_all(step: dict[str, Any]) -> bool:
    """Return whether a step before that of bytes cuts a text without leaving out a part."""
    if step["type"] == "Split":
        return step["behavior"] in LOSSLESS
    return step["type"] == "Digits"


def _bytes_of_tokens(values: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each token by id."""
    byte_of = {name: byte for byte, name in enumerate(BYTE_NAMES)}
    tokens = {}
    for token, i in values["model"]["vocab"].items():
        tokens[i] = bytes(byte_of[character] for character in token)
    for added in values.get("added_tokens") or ():
        tokens[added["id"]] = added["content"].encode()
    if any(type(i) is not int for i in tokens) or tokens.keys() != {*range(len(tokens))}:
        raise ValueError("its ids are not 0, 1, 2 ...")
    missing = {bytes([byte]) for byte in range(256)} - {*tokens.values()}
    if missing:
        raise ValueError(f"it has no token for the byte {min(missing)!r}")
    if not all(tokens.values()):
        raise ValueError("it has an empty token")
    return [tokens[i] for i in range(len(tokens))]
