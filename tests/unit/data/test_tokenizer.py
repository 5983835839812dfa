"""Characters to token ids and back."""

from __future__ import annotations

import pytest

from mingpt_ddp.data.tokenizer import CharTokenizer
from mingpt_ddp.errors import DataError


def test_decode_inverts_encode():
    tokenizer = CharTokenizer("\nabc")
    assert tokenizer.encode("cab\n") == [3, 1, 2, 0]
    assert tokenizer.decode([3, 1, 2, 0]) == "cab\n"
    assert tokenizer.encode("") == []


def test_unknown_characters_are_named():
    with pytest.raises(DataError, match="the model does not know 'x', 'y': these characters") as caught:
        CharTokenizer("abc").encode("ayxay")
    assert str(caught.value).startswith("data error: ")
