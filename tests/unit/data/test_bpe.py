"""Byte-level BPE: round trips are exact, chunks do not matter, and invalid files are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
from mingpt_ddp.data import download
from mingpt_ddp.data.tokenizers import bpe
from mingpt_ddp.data.tokenizers.bpe import BPETokenizer, split_at_words, train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import read_tokenizer, tokenizer_from_state
from mingpt_ddp.errors import ConfigError, DataError

TEXT = (
    "The quick brown fox, it's said: jumps!\n\n  über 12345 Füße — 日本語 😀\t\r\nand the lazy "
    "dog sleeps\n"
) * 40
ODD = ["", "\n", " ", "a", "é", "日本", "😀\u200d👩", "\x00\x7f\u0301", "  \n\n x", "<|endoftext|>"]
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
PATTERN = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed"}


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe(iter([TEXT]), 400)


def test_round_trip(tokenizer):
    for text in [*ODD, TEXT]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert sum(tokenizer.token_sizes[t] for t in tokens) == len(text.encode())
        assert sum(tokenizer.token_characters[t] for t in tokens) == len(text)
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2
    assert tokenizer.encode("\n") == [tokenizer.line_feed]
    state = json.loads(json.dumps(tokenizer.state()))
    again = tokenizer_from_state(state)
    assert again.state() == state and again.encode(TEXT) == tokenizer.encode(TEXT)


def test_an_incomplete_last_character_is_left_out(tokenizer):
    tokens = tokenizer.encode("ab\U0001f680")
    assert tokenizer.decode(tokens[:-1]) == "ab"
    assert tokenizer.decode([*tokens[:-1], *tokenizer.encode("c")]) == "ab\ufffdc"


def test_chunks_do_not_change_the_tokens(tokenizer, monkeypatch):
    whole = tokenizer.encode(TEXT)
    for size in (50, 1000):
        monkeypatch.setattr(bpe, "CHUNK_CHARS", size)
        for pieces in ([TEXT], [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)]):
            assert [
                token for part in tokenizer.encode_stream(iter(pieces)) for token in part
            ] == whole


def test_chunks_of_a_text_without_spaces(monkeypatch):
    monkeypatch.setattr(bpe, "CHUNK_CHARS", 10)
    assert [*split_at_words(iter(["日" * 25]))] == ["日" * 10, "日" * 10, "日" * 5]
    assert "".join(split_at_words(iter([TEXT]))) == TEXT


def test_training_is_deterministic(tokenizer, monkeypatch):
    """The number of cores, and the pieces in which the text arrives, change nothing."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train_bpe(iter([TEXT[:100], TEXT[100:]]), 400).json == tokenizer.json


def refuse(
    content: str | bytes, path: Path, message: str = "byte-level BPE tokenizer.json"
) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        read_tokenizer(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.type", "Unigram"),
        ("model.dropout", 0.1),
        ("model.vocab", {"a": 0}),
        ("model.vocab", ["a"]),
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [PATTERN, {"type": "ByteLevel"}]}),
        ("pre_tokenizer.add_prefix_space", True),
        ("added_tokens", [{"id": 400, "content": "<x>", "lstrip": True}]),
        ("added_tokens", [{"id": 999, "content": "<x>"}]),
        ("added_tokens", [{"id": 400, "content": ""}]),
        ("added_tokens", [{"id": float("inf"), "content": "<x>"}]),
        ("added_tokens", [{"id": 400.0, "content": "<x>"}]),
    ],
)
def test_tokenizers_that_cannot_decode_exactly_are_refused(key, value, tokenizer, tmp_path):
    changed = values = json.loads(tokenizer.json)
    *parents, last = key.split(".")
    for parent in parents:
        values = values[parent]
    values[last] = value
    refuse(json.dumps(changed), tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"model": 1}', b" " * (1 << 24)]
)
def test_files_that_are_not_a_tokenizer(content, tmp_path):
    refuse(content, tmp_path / "tokenizer.json")


def test_special_tokens(tokenizer, tmp_path):
    values = json.loads(tokenizer.json)
    n = tokenizer.vocab_size
    values["added_tokens"] = [{"id": n, "content": "<|end|>", "special": True} | FLAGS]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values, indent=1))
    own = read_tokenizer(str(tmp_path / "tokenizer.json"))
    assert n in own.encode("a<|end|>b") and own.decode(own.encode("a<|end|>b")) == "a<|end|>b"
    assert own.token_sizes[n] == 7


# ids in the wrong order, and an id that another token has
@pytest.mark.parametrize("ids", [(1, 0), (-9, 0)])
def test_added_tokens_that_the_library_numbers_otherwise_are_refused(ids, tokenizer):
    values = json.loads(tokenizer.json)
    ids = [tokenizer.vocab_size + i for i in ids]
    values["added_tokens"] = [{"id": i, "content": f"<{i}>", "special": True} | FLAGS for i in ids]
    with pytest.raises(DataError, match=r"gives the added token .* another id"):
        BPETokenizer(json.dumps(values)).encode("abc")


def test_a_filesystem_whose_library_is_missing(monkeypatch):
    monkeypatch.setattr(download, "open_filesystem", lambda path: __import__("no_such_library"))
    with pytest.raises(DataError, match="no_such_library"):
        read_tokenizer("gs://bucket/tokenizer.json")


def splitting_at(pattern):
    """Return the JSON of a byte tokenizer that first splits texts by a regular expression."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    byte_level = {"type": "ByteLevel", **flags}
    split = PATTERN | {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    vocab = {name: i for i, name in enumerate(bpe.BYTE_NAMES)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    before = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return json.dumps(
        {"version": "1.0", "model": model, "pre_tokenizer": before, "decoder": byte_level}
    )


def test_a_pattern_that_backtracks_past_the_limit_of_the_library(capfd):
    """The library panics and prints a backtrace. The panic is not an Exception in Python."""
    ordinary = BPETokenizer(splitting_at(r"\p{L}+|\s+"))
    assert ordinary.decode(ordinary.encode("so it is")) == "so it is"
    tokenizer = BPETokenizer(splitting_at("(a+)+b"))
    for encode in (tokenizer.encode, lambda text: [*tokenizer.encode_stream(iter([text]))]):
        with pytest.raises(
            DataError, match=r"cannot encode the text: .*retry-limit.*; use another data.tokenizer"
        ):
            encode("a" * 60)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_path_that_is_not_a_regular_file(kind, tmp_path):
    paths = {"pipe": tmp_path / "pipe", "device": "/dev/zero", "directory": tmp_path}
    os.mkfifo(paths["pipe"])
    with pytest.raises(DataError, match="not a regular file"):
        read_tokenizer(str(paths[kind]))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'mingpt_ddp\[tokenizers\]'"):
        train_bpe(iter([TEXT]), 300)


def test_a_tokenizer_that_could_not_be_read_again_is_refused(tokenizer, tmp_path, monkeypatch):
    """A snapshot stores the JSON in ASCII, where a name outside ASCII takes six characters."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.json), ensure_ascii=False))
    kept = len(tokenizer.json)
    assert len(path.read_text()) < kept
    monkeypatch.setattr(bpe, "MAX_JSON_CHARS", kept)
    assert tokenizer_from_state(read_tokenizer(str(path)).state()).json == tokenizer.json
    monkeypatch.setattr(bpe, "MAX_JSON_CHARS", kept - 1)
    with pytest.raises(DataError, match=f"it has more than {kept - 1:,} characters"):
        read_tokenizer(str(path))
