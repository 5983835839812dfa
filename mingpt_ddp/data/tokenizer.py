"""The tokenizer: a token is the index of a character in the vocabulary."""

from mingpt_ddp.errors import DataError


class CharTokenizer:
    """Characters to token ids and back."""

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.index = {character: i for i, character in enumerate(vocabulary)}

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
