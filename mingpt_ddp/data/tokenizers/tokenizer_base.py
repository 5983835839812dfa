"""What every tokenizer has, and helpers on characters and bytes."""

import codecs
from collections.abc import Iterator
from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints
from mingpt_ddp.errors import DataError

END = "\ud800"  # ends a document in the pieces of a text; UTF-8 has no such character
# What tokenizers call the token after a text; their files do not say which it is.
END_NAMES = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|end_of_text|>", "<|endoftext|>")
END_NAME = END_NAMES[-1]  # of one that is added
# An added token that stands for its own characters and no others.
EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class Tokenizer:
    """Text to token ids and back; `decode` inverts `encode` exactly.

    Attributes:
        name: char, byte or bpe.
        token_sizes: (V,) int64, bytes of each token in UTF-8.
        token_characters: (V,) int64, characters that begin in each token.
        line_feed: id of the token of a line feed, or 0.
        end: id of the token that ends a document, which no text contains; None: there is none. It
            has no bytes and no characters.
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
        """
        Raises:
            DataError: naming what cannot be encoded.
        """
        raise NotImplementedError

    def with_end(self) -> "Tokenizer":
        """Return this tokenizer with a token that ends a document: its own, or one id more."""
        raise NotImplementedError

    def encode_stream(self, texts: Iterator[str]) -> Iterator[Ints]:
        """Yield the tokens of a text that comes in pieces, in bounded memory.

        END in it becomes the token that ends a document.

        Raises:
            DataError: as `encode`.
        """
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 give U+FFFD, a cut last character nothing."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return JSON values for state.json, which `tokenizer_from_state` reads."""
        raise NotImplementedError


def code_points(text: str) -> Ints:
    """Return the code points of a text as uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def utf8(text: str) -> bytes:
    """Encode text.

    Raises:
        DataError: it has bytes that were no UTF-8, which Python holds as surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text is not UTF-8 at character {error.start}") from error


def begins_character(data: bytes) -> Ints:
    """Return for each byte of UTF-8 whether a character begins there."""
    return np.frombuffer(data, dtype=np.uint8) & 0xC0 != 0x80


def decode_bytes(data: bytes) -> str:
    """Decode UTF-8, with U+FFFD for invalid bytes and without a cut character at the end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
