"""The tokenizer of a directory of transformers."""

from __future__ import annotations

import pytest

from mingpt_ddp.data.bpe import train_bpe
from mingpt_ddp.data.tokenizer import ByteTokenizer, CharTokenizer
from mingpt_ddp.snapshots.transformers_export import tokenizer_json
from mingpt_ddp.snapshots.transformers_import import read_tokenizer
from mingpt_ddp.storage.urls import open_storage


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_an_exported_tokenizer_is_read_again(name, tmp_path):
    if name == "bpe":
        pytest.importorskip("tokenizers")
        tokenizer = train_bpe(iter(["to be or not to be " * 9]), 270)
    else:
        tokenizer = CharTokenizer("\n abß") if name == "char" else ByteTokenizer()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
    again = read_tokenizer(open_storage(str(tmp_path)), ["tokenizer.json"])
    assert again is not None and again.state() == tokenizer.state()
