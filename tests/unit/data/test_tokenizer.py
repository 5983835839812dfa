"""Characters to token ids and back."""

from __future__ import annotations

import pytest

from mingpt_ddp.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, tokenizer_from_state
from mingpt_ddp.errors import DataError


def test_decode_inverts_encode():
    tokenizer = CharTokenizer("\nabc")
    assert tokenizer.encode("cab\n") == [3, 1, 2, 0]
    assert tokenizer.decode([3, 1, 2, 0]) == "cab\n"
    assert tokenizer.encode("") == []


def test_unknown_characters_are_named():
    with pytest.raises(
        DataError, match="the model does not know 'x', 'y': these characters"
    ) as caught:
        CharTokenizer("abc").encode("ayxay")
    assert str(caught.value).startswith("data error: ")


def test_sizes_of_characters():
    tokenizer = CharTokenizer("\na\x7f\x80ß\u07ff\u0800€\uffff\U00010000😀")
    assert tokenizer.token_sizes.tolist() == [len(c.encode()) for c in tokenizer.vocabulary]
    assert tokenizer.token_characters.tolist() == [1] * tokenizer.vocab_size
    assert (tokenizer.line_feed, CharTokenizer("ab").line_feed) == (0, 0)


def test_state():
    tokenizer = CharTokenizer("\nabc")
    assert tokenizer.state() == {"vocabulary": "\nabc"}
    assert tokenizer_from_state(tokenizer.state()).encode("cab") == [3, 1, 2]
    for state in ({}, [], {"vocabulary": 7}, {"vocabulary": None}):
        with pytest.raises((LookupError, TypeError, ValueError)):
            tokenizer_from_state(state)


def test_bytes():
    tokenizer = ByteTokenizer()
    text = "a\nß€😀"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text)[:-1]) == "a\nß€"
    assert tokenizer_from_state(tokenizer.state()).vocab_size == 256
    tokens = tokenizer.encode(text)
    assert tokenizer.token_sizes[tokens].sum() == len(tokens)
    assert tokenizer.token_characters[tokens].sum() == len(text)
    with pytest.raises(DataError, match="not UTF-8"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize(
    "kept", [None, 7, {}, {"type": "other"}, {"type": "bpe"}, {"type": "bpe", "json": "{}"}]
)
def test_invalid_states(kept):
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        tokenizer_from_state({"tokenizer": kept, "vocabulary": "ab"})
