"""Character and byte tokenizers, and the tokenizer states in snapshots."""

from __future__ import annotations

import json

import pytest

from mingpt_ddp.data.tokenizers.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    NoTokenizer,
    read_tokenizer,
    tokenizer_from_state,
)
from mingpt_ddp.data.tokenizers.tokenizer_base import END
from mingpt_ddp.errors import DataError

ODD = "\na\x7f\x80ß\u07ff\u0800€\uffff\U00010000😀"


def test_characters():
    tokenizer = CharTokenizer("\nabc")
    assert tokenizer.encode("cab\n") == [3, 1, 2, 0] and tokenizer.encode("") == []
    assert tokenizer.decode([3, 1, 2, 0]) == "cab\n"
    assert (tokenizer.line_feed, CharTokenizer("ab").line_feed) == (0, 0)
    with pytest.raises(DataError, match="data error: the model does not know 'x', 'y': "):
        tokenizer.encode("ayxay")
    assert tokenizer.state() == {"vocabulary": "\nabc"}
    assert tokenizer_from_state(tokenizer.state()).encode("cab") == [3, 1, 2]
    tokenizer = CharTokenizer(ODD)
    assert tokenizer.token_sizes.tolist() == [len(c.encode()) for c in ODD]
    assert tokenizer.token_characters.tolist() == [1] * len(ODD)


def test_bytes():
    tokenizer = ByteTokenizer()
    text = "a\nß€😀"
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens[:-1]) == "a\nß€"
    assert tokenizer_from_state(tokenizer.state()).vocab_size == 256
    assert tokenizer.token_sizes[tokens].sum() == len(tokens)
    assert tokenizer.token_characters[tokens].sum() == len(text)
    with pytest.raises(DataError, match="not UTF-8"):
        tokenizer.encode("a\udcff")


def test_no_tokenizer(tmp_path):
    state = NoTokenizer(50257).state()
    known = tokenizer_from_state(state)
    assert isinstance(known, NoTokenizer) and known.vocab_size == 50257
    # Earlier versions would read a "json" entry of any tokenizer type that they do not know.
    assert "json" not in state["tokenizer"]
    for call in (lambda: known.encode(""), lambda: known.decode([1])):
        with pytest.raises(DataError, match="neither read nor write text"):
            call()
    (tmp_path / "meta.json").write_text(json.dumps({"vocabulary": "aba"}))
    with pytest.raises(DataError, match="its vocabulary has a character twice"):
        read_tokenizer(str(tmp_path / "meta.json"))


@pytest.mark.parametrize(
    "tokenizer", [CharTokenizer("\nab"), ByteTokenizer()], ids=["char", "byte"]
)
def test_a_tokenizer_with_an_end_token(tokenizer):
    ended = tokenizer.with_end()
    assert ended.end == tokenizer.vocab_size == ended.vocab_size - 1
    assert ended.with_end().state() == ended.state() != tokenizer.state()
    again = tokenizer_from_state(json.loads(json.dumps(ended.state())))
    assert (again.end, again.state()) == (ended.end, ended.state())
    assert ended.decode([*ended.encode("ab"), ended.end, *ended.encode("b")]) == "abb"


def test_characters_that_follow_the_end_token():
    """A run that starts from another run's weights adds its characters after theirs."""
    tokenizer = CharTokenizer(f"a{END}b")
    assert tokenizer.state() == {"vocabulary": "ab", "end_token": 1}
    again = tokenizer_from_state(tokenizer.state())
    assert (again.encode("ab"), again.end) == ([0, 2], 1)


TYPES = [None, 7, {}, {"type": "other"}, {"type": "bpe"}, {"type": "bpe", "json": "{}"}]
NO_SIZES = [0, -1, True, 1 << 40, "5", None]
NO_ENDS = ["1", -1, 1.0, [], True]


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        {"vocabulary": 7},
        {"vocabulary": None},
        *({"tokenizer": kept, "vocabulary": "ab"} for kept in TYPES),
        *({"tokenizer": {"type": "none", "vocab_size": size}} for size in NO_SIZES),
        *({"vocabulary": "ab", "end_token": end} for end in NO_ENDS),
        *({"tokenizer": {"type": "byte", "end_token": end}} for end in NO_ENDS),
    ],
    ids=str,
)
def test_invalid_states(state):
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        tokenizer_from_state(state)
