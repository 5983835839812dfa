"""Tokenize by byte-level BPE with the `tokenizers` library.

The library is imported only to train and to encode. A tokenizer is kept as JSON in the library's
format. It is accepted only if decoding restores a text exactly: it must be BPE on bytes, without a
normalizer. The size of the JSON is limited, and all values that this module uses are checked.
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

MAX_JSON_CHARS = 1 << 23  # state.json, which includes this JSON, may have up to 16 MiB
DEFAULT_VOCAB_SIZE = 4096
CHUNK_CHARS = 1 << 16  # one thread encodes this many characters in one call
CHUNKS_PER_CALL = 16  # all cores together encode this many chunks in one call
BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
# GPT-2's name of each byte: its Latin-1 character if this is printable, else one from U+0100 on.
BYTE_NAMES = [
    chr(byte if byte in PRINTABLE else 256 + UNPRINTABLE.index(byte)) for byte in range(256)
]
LOSSY_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
# Behaviours of a Split step in tokenizer.json that keep all characters.
LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class BPETokenizer(Tokenizer):
    """A tokenizer by byte-level BPE. A token is a sequence of bytes.

    Decoding does not need the library.
    """

    name = "bpe"

    def __init__(self, text: str, end: int | None = None) -> None:
        """
        Args:
            text: The tokenizer's JSON.
            end: Id of the special token that ends a document, or None. If it is given, the names of
                special tokens in a text are encoded like any other characters.

        Raises:
            LookupError, TypeError, ValueError: The JSON is not a byte-level BPE tokenizer, or it
                does not decode exactly.
        """
        values = _checked(text)
        kept = {**values, "truncation": None, "padding": None}
        self.json = json.dumps(kept, separators=(",", ":"), sort_keys=True)
        # Check the length again: escaped as ASCII, the JSON may have become longer.
        _check_length(self.json)
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
        """Encode a text.

        Raises:
            ConfigError: The library is not installed.
            DataError: The library refuses the tokenizer or the text.
        """
        [encoding] = self._encode([utf8(text).decode()])
        return list(encoding.ids)

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        """Encode a text in pieces on all cores. The tokens do not depend on the number of cores."""
        chunks = split_at_words(texts)
        while batch := list(islice(chunks, CHUNKS_PER_CALL)):
            pieces: list[str] = []
            ends_document: list[bool] = []  # True for each piece that is the last of its document
            for chunk in batch:
                parts = chunk.split(END)
                pieces += parts
                ends_document += [True] * (len(parts) - 1) + [False]
            tokens: list[int] = []
            for encoding, ends in zip(self._encode(pieces), ends_document, strict=True):
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
        """Encode several texts by the library, on all cores.

        Raises:
            ConfigError: The library is not installed.
            DataError: The library refuses the tokenizer or a text.
        """
        encoder = self._library_tokenizer()
        try:
            with _panics_as_errors():
                return list(encoder.encode_batch_fast(texts, add_special_tokens=False))
        # The library raises Exception itself, never a subclass.
        except Exception as error:
            raise DataError(
                f"the tokenizer cannot encode the text: {str(error)[:200]}; use another "
                "data.tokenizer"
            ) from error

    def _library_tokenizer(self) -> Any:
        """Return the library's tokenizer object. The first call makes it.

        Raises:
            ConfigError: The library is not installed.
            DataError: The library refuses the tokenizer, or gives a token another id.
        """
        if self._encoder is not None:
            return self._encoder
        lib = library()
        try:
            with _panics_as_errors():
                self._encoder = lib.Tokenizer.from_str(self.json)
            self._encoder.encode_special_tokens = self.end is not None
        # The library raises Exception itself, never a subclass.
        except Exception as error:
            raise DataError(
                f"the library tokenizers refuses the tokenizer: {str(error)[:200]}; use another "
                "data.tokenizer"
            ) from error
        # The library ignores the ids of added tokens, and numbers these tokens in their order.
        for token in json.loads(self.json).get("added_tokens") or ():
            if self._encoder.token_to_id(token["content"]) != token["id"]:
                raise DataError(
                    "the library tokenizers gives the added token "
                    f"{token['content']!r:.50} another id than tokenizer.json; number the added "
                    "tokens there after all other tokens, in their order"
                )
        return self._encoder


def library() -> Any:
    """Import the `tokenizers` library.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "a BPE tokenizer needs tokenizers; pip install 'mingpt_ddp[tokenizers]', "
            "or use data.tokenizer=char or byte"
        ) from error
    return tokenizers


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Turn a panic of the library into a ValueError, and hide the backtrace that it prints.

    The panic itself is raised as PyO3's PanicException, which does not inherit from Exception.
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
    """Discard everything that this process writes to file descriptor 2 (standard error)."""
    try:
        kept = os.dup(2)
    except OSError:  # the descriptor is closed
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
    """Train a BPE tokenizer on the documents of a text. A small text may give fewer tokens."""
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
    """Cut a text into chunks, each before a space between two letters.

    Pre-tokenizers cut there too, so the chunks can be encoded one by one. A chunk without such a
    space ends after CHUNK_CHARS characters. The chunks do not depend on the pieces of the text.
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
    """Parse the JSON of a tokenizer.

    Raises:
        LookupError, TypeError, ValueError: The JSON is not a byte-level BPE tokenizer, or it does
            not decode exactly.
    """
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
    """Return True if a tokenizer is a byte-level BPE, and decoding restores a text exactly."""
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
    """Return True if a pre-tokenizer step cuts a text without removing any of it."""
    if step["type"] == "Split":
        return step["behavior"] in LOSSLESS_BEHAVIORS
    return step["type"] == "Digits"


def _bytes_of_tokens(values: dict[str, Any]) -> list[bytes]:
    """List the bytes of each token, in the order of the ids.

    Raises:
        ValueError: The ids have gaps, a byte has no token, or a token is empty.
    """
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
