"""Turn text into token ids and back, and restore tokenizers from files and snapshots."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from mingpt_ddp.data.download import read_file
from mingpt_ddp.data.rng import Ints
from mingpt_ddp.data.tokenizers.bpe import MAX_JSON_CHARS, BPETokenizer
from mingpt_ddp.data.tokenizers.tokenizer_base import (
    END,
    Tokenizer,
    begins_character,
    code_points,
    decode_bytes,
    utf8,
)
from mingpt_ddp.errors import DataError

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "NoTokenizer",
    "Tokenizer",
    "read_tokenizer",
    "tokenizer_from_state",
]

CODE_POINTS = 0x110000
MAX_VOCAB_SIZE = 1 << 20


class CharTokenizer(Tokenizer):
    """A tokenizer whose tokens are the indices of characters in its vocabulary."""

    name = "char"

    def __init__(self, vocabulary: str) -> None:
        """
        Args:
            vocabulary: The characters in the order of their ids. END stands for the token that ends
                a document, if there is one.
        """
        self.vocabulary = vocabulary
        self.index = {character: i for i, character in enumerate(vocabulary)}
        self.line_feed = self.index.get("\n", 0)
        # From each of these code points on, UTF-8 needs one more byte.
        longer_from = [0x80, 0x800, 0x10000]
        self.token_sizes = 1 + np.searchsorted(longer_from, code_points(vocabulary), side="right")
        self.token_characters = np.ones(len(vocabulary), dtype=np.int64)
        self.end = self.index.get(END)
        if self.end is not None:
            self.token_sizes[self.end] = 0
            self.token_characters[self.end] = 0

    def with_end(self) -> Tokenizer:
        return self if self.end is not None else CharTokenizer(self.vocabulary + END)

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        Raises:
            DataError: Characters are not in the vocabulary. The error names them.
        """
        unknown = sorted(set(text) - self.index.keys())
        if unknown:
            names = ", ".join(map(repr, unknown[:10]))
            raise DataError(
                f"the model does not know {names}: these characters are not in its training text; "
                "leave them out, or train a model with data.tokenizer=byte"
            )
        return [self.index[c] for c in text]

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        codes = code_points(self.vocabulary)
        token_of = np.full(CODE_POINTS, len(codes), dtype=np.min_scalar_type(len(codes)))
        token_of[codes] = np.arange(len(codes))
        for text in texts:
            tokens = token_of[code_points(text)]
            if (tokens == len(codes)).any():
                self.encode(text)  # raises an error that names the unknown characters
            yield tokens

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.vocabulary[t] for t in tokens).replace(END, "")

    def state(self) -> dict[str, Any]:
        if self.end is None:
            return {"vocabulary": self.vocabulary}
        return {"vocabulary": self.vocabulary.replace(END, ""), "end_token": self.end}


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are the bytes of the text in UTF-8."""

    name = "byte"
    line_feed = ord("\n")

    def __init__(self, has_end: bool = False) -> None:
        self.end = 256 if has_end else None
        begins = begins_character(bytes(range(256)))
        self.token_sizes = np.array([1] * 256 + [0] * has_end)
        self.token_characters = np.array([*begins.astype(int), *[0] * has_end])

    def with_end(self) -> Tokenizer:
        return ByteTokenizer(has_end=True)

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        for text in texts:
            documents = b"\xff".join(part.encode() for part in text.split(END))
            tokens: Ints = np.frombuffer(documents, dtype=np.uint8)
            if self.end is not None:
                is_end = tokens == 0xFF  # UTF-8 never contains this byte
                tokens = tokens.astype(np.uint16)
                tokens[is_end] = self.end
            yield tokens

    def decode(self, tokens: list[int]) -> str:
        return decode_bytes(bytes(token for token in tokens if token != self.end))

    def state(self) -> dict[str, Any]:
        end = {} if self.end is None else {"end_token": self.end}
        return {"tokenizer": {"type": self.name, **end}}


class NoTokenizer(Tokenizer):
    """A stand-in for the unknown tokenizer of token ids. It cannot encode or decode."""

    name = "none"

    def __init__(self, vocab_size: int) -> None:
        if type(vocab_size) is not int or not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError("expected a vocabulary size")
        self.token_sizes = np.zeros(vocab_size, dtype=np.int64)  # unknown

    def encode(self, text: str) -> list[int]:
        raise _no_tokenizer_error()

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        raise _no_tokenizer_error()

    def decode(self, tokens: list[int]) -> str:
        raise _no_tokenizer_error()

    def state(self) -> dict[str, Any]:
        return {"tokenizer": {"type": self.name, "vocab_size": self.vocab_size}}


def _no_tokenizer_error() -> DataError:
    return DataError(
        "the model has no tokenizer, so it can neither read nor write text: its run was given "
        "token ids without data.tokenizer; train it with data.tokenizer=PATH, the tokenizer.json "
        "that made them"
    )


def read_tokenizer(path: str) -> Tokenizer:
    """Read a tokenizer.json, or a JSON file with characters in the order of their ids.

    Raises:
        DataError: There is no such file, or it is not a byte-level BPE that decodes exactly.
    """
    try:
        text = read_file(path, 4 * MAX_JSON_CHARS).decode()
        values = json.loads(text)
        if "vocabulary" not in values:
            return BPETokenizer(text)
        vocabulary = values["vocabulary"]
        if len({*vocabulary}) != len(vocabulary):
            raise ValueError("its vocabulary has a character twice")
        return tokenizer_from_state({"vocabulary": vocabulary})
    except FileNotFoundError as error:
        raise DataError(
            f"data.tokenizer={path}: there is no such file; name a tokenizer.json, or use char, "
            "byte or bpe (the name of a model on a hub does not work, because nothing is "
            "downloaded)"
        ) from error
    # The type of the exception depends on the protocol of the path.
    except Exception as error:
        raise DataError(
            f"data.tokenizer={path} must be a byte-level BPE tokenizer.json: {str(error)[:200]}"
        ) from error


def tokenizer_from_state(state: Any) -> Tokenizer:
    """Restore the tokenizer from the state of a snapshot.

    Args:
        state: Untrusted JSON values. The caller has checked their size.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: The state has no valid tokenizer.
    """
    if "tokenizer" in state:
        kept = state["tokenizer"]
        end = _end_of(kept)
        if kept["type"] == ByteTokenizer.name:
            return ByteTokenizer(has_end=end is not None)
        if kept["type"] == NoTokenizer.name:
            return NoTokenizer(kept["vocab_size"])
        return BPETokenizer(kept["json"], end)
    vocabulary = state["vocabulary"]
    if not isinstance(vocabulary, str):
        raise ValueError("expected a vocabulary")
    vocabulary.encode()  # raises UnicodeEncodeError for END and other lone surrogates
    end = _end_of(state)
    if end is not None:
        vocabulary = vocabulary[:end] + END + vocabulary[end:]
    return CharTokenizer(vocabulary)


def _end_of(kept: dict[str, Any]) -> int | None:
    """Read the id of the token that ends a document, if the state of a tokenizer has one."""
    end = kept.get("end_token")
    if end is not None and (type(end) is not int or end < 0):
        raise ValueError("expected the id of the token that ends a document")
    return end
