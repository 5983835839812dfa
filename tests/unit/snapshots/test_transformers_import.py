"""Tokenizers are read from directories in the format of transformers."""

from __future__ import annotations

import json

import pytest

from mingpt_ddp.data.tokenizers.bpe import train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from mingpt_ddp.errors import DataError
from mingpt_ddp.snapshots.transformers_format.tokenizer_files import (
    padding,
    read_tokenizer,
    tokenizer_json,
)
from mingpt_ddp.storage.urls import open_storage


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_an_exported_tokenizer_is_read_again(name, tmp_path):
    if name == "bpe":
        pytest.importorskip("tokenizers")
        tokenizer = train_bpe(iter(["to be or not to be " * 9]), 270)
    else:
        tokenizer = CharTokenizer("\n abß") if name == "char" else ByteTokenizer()
    for exported in (tokenizer, tokenizer.with_end()):
        (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(exported))
        again = read_tokenizer(open_storage(str(tmp_path)), ["tokenizer.json"])
        assert again is not None and again.vocab_size == exported.vocab_size
        if exported.end is not None:  # a BPE tokenizer treats it as any other special token
            again = again.with_end()
        assert again.state() == exported.state()


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_a_tokenizer_that_transformers_has_saved_again(name, tmp_path):
    """transformers then declares a padding token, whose name would be the text \u00ff."""
    pytest.importorskip("tokenizers")
    tokenizer = (
        ByteTokenizer() if name == "byte" else train_bpe(iter(["to be or not to be " * 9]), 270)
    )
    values = json.loads(tokenizer_json(tokenizer))
    pad = padding(tokenizer)["pad_token"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"] = [
        {"id": values["model"]["vocab"][pad], "content": pad, "special": True, **flags}
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    again = read_tokenizer(open_storage(str(tmp_path)), ["tokenizer.json"])
    assert again is not None and again.state() == tokenizer.state()
    assert again.decode(again.encode(f"to be{pad}")) == f"to be{pad}"
    values["added_tokens"][0]["id"] = len(values["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="another id"):  # only the padding token is an exception
        read_tokenizer(open_storage(str(tmp_path)), ["tokenizer.json"]).encode("to")


def test_the_end_of_a_text_in_the_files_of_gpt2(tmp_path):
    """vocab.json and merges.txt do not mark it as a special token."""
    pytest.importorskip("tokenizers")
    model = json.loads(tokenizer_json(train_bpe(iter(["to be or not to be " * 9]), 270)))["model"]
    end = len(model["vocab"])
    vocab = {**model["vocab"], "<|endoftext|>": end}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    tokenizer = read_tokenizer(open_storage(str(tmp_path)), ["vocab.json", "merges.txt"])
    assert tokenizer is not None
    assert tokenizer.encode("to<|endoftext|>be").count(end) == 1
    assert tokenizer.decode(tokenizer.encode("to<|endoftext|>be")) == "to<|endoftext|>be"
