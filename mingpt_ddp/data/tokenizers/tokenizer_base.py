"""Define the interface of tokenizers, and helpers for characters and bytes."""

import codecs
from collections.abc import Iterator
from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints
from mingpt_ddp.errors import DataError

# Marks the end of a document in the pieces of a text. UTF-8 cannot encode this character.
END = "\ud800"
# Usual names of the token that ends a document. The file of a tokenizer does not say which token it
# is.
END_NAMES = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|end_of_text|>", "<|endoftext|>")
END_NAME = END_NAMES[-1]  # name of the token if it must be added to a tokenizer
# Options of an added token in a tokenizer.json that matches exactly its own characters.
EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class Tokenizer:
    """Base class of tokenizers, which turn text into token ids and back.

    `decode` inverts `encode` exactly.

    Attributes:
        name: Name of the type of tokenizer: char, byte, bpe or none.
        token_sizes: (V,) int64, size of each token in bytes of UTF-8.
        token_characters: (V,) int64, number of characters that begin in each token.
        line_feed: Id of the token for a line feed, or 0 if there is none.
        end: Id of the token that ends a document, or None if the tokenizer has none. No text
            contains this token, and it has no bytes and no characters.
    """

    name: str
    token_sizes: Ints
    token_characters: Ints
    line_feed: int
    end: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.token_sizes)

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        Raises:
            DataError: The text cannot be encoded. The error names the characters or the position.
        """
        raise NotImplementedError

    def with_end(self) -> "Tokenizer":
        """Return this tokenizer with a token that ends a document.

        If its vocabulary has no such token, one is added.
        """
        raise NotImplementedError

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        """Encode a text that arrives in pieces, in bounded memory.

        The character END becomes the token that ends a document.

        Raises:
            DataError: The text cannot be encoded.
        """
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens.

        Bytes that are not UTF-8 become U+FFFD. A last character that is cut off is left out.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Describe the tokenizer by JSON values, for state.json and `tokenizer_from_state`."""
        raise NotImplementedError


def code_points(text: str) -> Ints:
    """Return the code points of a text as uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8.

    Raises:
        DataError: The text has surrogates. Python uses them for bytes that were not UTF-8.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text is not UTF-8 at character {error.start}") from error


def begins_character(data: bytes) -> Ints:
    """Compute for each byte of UTF-8 whether a character begins there."""
    return np.frombuffer(data, dtype=np.uint8) & 0xC0 != 0x80


def decode_bytes(data: bytes) -> str:
    """Decode UTF-8. Invalid bytes become U+FFFD, and a cut character at the end is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
