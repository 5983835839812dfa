"""Tokenizers: text to token ids and back, and their form in a snapshot."""

from typing import Any

import numpy as np

from mingpt_ddp.data.rng import Ints
from mingpt_ddp.errors import DataError


class Tokenizer:
    """Text to token ids and back; `decode` inverts `encode` exactly.

    Attributes:
        name: char, byte or bpe.
        token_sizes: (V,) int64, bytes of each token in UTF-8.
        token_characters: (V,) int64, characters that begin in each token.
        line_feed: id of the token of a line feed, or 0; stands for an empty prompt.
    """

    name: str
    token_sizes: Ints
    token_characters: Ints
    line_feed: int

    @property
    def vocab_size(self) -> int:
        return len(self.token_sizes)

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            DataError: naming what cannot be encoded.
        """
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return JSON values for state.json, which `tokenizer_from_state` reads."""
        raise NotImplementedError


class CharTokenizer(Tokenizer):
    """A token is the index of a character in the vocabulary."""

    name = "char"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.index = {character: i for i, character in enumerate(vocabulary)}
        self.line_feed = self.index.get("\n", 0)
        codes = np.frombuffer(vocabulary.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self.token_sizes = 1 + np.searchsorted([0x80, 0x800, 0x10000], codes, side="right")
        self.token_characters = np.ones(len(codes), dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            DataError: naming the characters that are not in the vocabulary.
        """
        unknown = sorted(set(text) - self.index.keys())
        if unknown:
            names = ", ".join(map(repr, unknown[:10]))
            raise DataError(f"the model does not know {names}: these characters are not in its training text")
        return [self.index[c] for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.vocabulary[t] for t in tokens)

    def state(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary}


def tokenizer_from_state(state: Any) -> Tokenizer:
    """Return the tokenizer of an untrusted snapshot state, whose size the reader has bounded.

    Raises:
        LookupError, TypeError, ValueError: there is no valid tokenizer.
    """
    vocabulary = state["vocabulary"]
    if not isinstance(vocabulary, str):
        raise ValueError("expected a vocabulary")
    return CharTokenizer(vocabulary)
