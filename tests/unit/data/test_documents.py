"""With data.end_token, every tokenizer ends each document with a special token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.digests import digest_of
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.tokenizers.bpe import BPETokenizer, train_bpe
from mingpt_ddp.data.tokenizers.tokenizer import Tokenizer, tokenizer_from_state
from mingpt_ddp.data.tokenizers.tokenizer_base import END, END_NAME
from mingpt_ddp.errors import ConfigError
from tests.unit.data.reading import make_directory, make_tar, prepare, tokens_of

NAMES = ["char", "byte", "bpe"]
FILES = {
    "a.txt": "to be, or not to be: größer\n",
    "b.txt": "",
    "bom.txt": "\ufeff",  # only a byte order mark
    "c.txt": f"no line feed {END_NAME} </s>",
    "d.txt": "the last one " * 20 + "\n",
}
DOCUMENTS = [FILES[name] for name in ("a.txt", "c.txt", "d.txt")]


def directory(tmp_path: Path) -> Path:
    files = {name: text.encode() for name, text in FILES.items()}
    return make_directory(tmp_path / "texts", files)


def documents_of(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.end:
            documents.append([])
        else:
            documents[-1].append(token)
    return [tokenizer.decode(document) for document in documents]


@pytest.mark.parametrize("name", NAMES)
def test_each_file_of_a_directory_is_a_document(name, settings, tmp_path):
    if name == "bpe":
        pytest.importorskip("tokenizers")
    size = 270 if name == "bpe" else None
    joined = settings(directory(tmp_path), tokenizer=name, vocab_size=size)
    config = replace(joined, end_token=True, val_paths={"one": str(tmp_path / "texts/a.txt")})
    texts = prepare_all(config)
    encoded = texts[""]
    tokenizer = tokenizer_from_state(encoded.tokenizer)
    assert documents_of(tokens_of(encoded), tokenizer) == [*DOCUMENTS, ""]
    assert tokenizer.decode(tokens_of(encoded)) == "".join(DOCUMENTS)
    assert tokens_of(texts["one"]) == [*tokenizer.encode(FILES["a.txt"]), tokenizer.end]
    assert tokenizer.token_sizes[tokenizer.end] == 0
    assert tokenizer.token_characters[tokenizer.end] == 0
    assert tokenizer.token_sizes[tokens_of(encoded)].sum() == len("".join(DOCUMENTS).encode())
    assert prepare_all(config) == texts  # read from the cache
    plain = prepare(joined)
    digests = [sha256(text.encode()).hexdigest() for text in DOCUMENTS]
    assert encoded.sha256 == digest_of(digests)  # also depends on where documents end
    assert (
        plain.sha256 == sha256("".join([*DOCUMENTS[:-1], "\n", DOCUMENTS[-1]]).encode()).hexdigest()
    )
    assert tokenizer_from_state(plain.tokenizer).end is None
    if name == "bpe":
        assert tokenizer.vocab_size == size


def test_the_same_characters_split_into_other_documents_are_a_different_text(settings, tmp_path):
    lines = ["one\n", "two\n", "three\n"]
    texts = {"whole": ["".join(lines)], "two": ["".join(lines[:2]), lines[2]], "three": lines}
    encoded = {}
    for name, documents in texts.items():
        files = {f"{i}.txt": document.encode() for i, document in enumerate(documents)}
        make_directory(tmp_path / name, files)
        config = settings(tmp_path / name, tokenizer="byte", end_token=True)
        encoded[name] = prepare(config)
        assert tokens_of(encoded[name]).count(256) == len(documents)
        assert prepare(config) == encoded[name]
    assert len({text.sha256 for text in encoded.values()}) == 3
    digests = [sha256(line.encode()).hexdigest() for line in lines]
    # The rule is that of several files of records.
    assert encoded["three"].sha256 == digest_of(digests)
    make_tar(tmp_path / "three.tar", {f"{i}.txt": line.encode() for i, line in enumerate(lines)})
    packed = prepare(replace(config, path=f"tar://**::{tmp_path}/three.tar"))
    assert packed.sha256 == encoded["three"].sha256
    assert packed.tokens_sha256 == encoded["three"].tokens_sha256


@pytest.mark.parametrize("name", NAMES)
def test_each_string_that_a_reader_yields_is_a_document(name, settings, monkeypatch):
    """This reader filters rows. Splitting the same characters differently gives another text."""
    if name == "bpe":
        pytest.importorskip("tokenizers")
    rows = [("en", "to be größer "), ("de", "sein"), ("en", ""), ("en", "or not\n" * 30)]

    def english(config: DataConfig) -> Iterator[str]:
        yield from (text for lang, text in rows if lang == "en")

    monkeypatch.setitem(BUILDERS["data"], "english", english)
    size = 270 if name == "bpe" else None
    config = settings("", reader="english", tokenizer=name, vocab_size=size, end_token=True)
    encoded = prepare(config)
    tokenizer = tokenizer_from_state(encoded.tokenizer)
    documents = [rows[0][1], rows[3][1]]
    assert documents_of(tokens_of(encoded), tokenizer) == [*documents, ""]
    rows[:] = [("en", documents[0][:5]), ("en", documents[0][5:] + documents[1])]
    assert prepare(config).sha256 != encoded.sha256


def test_one_text_is_one_document(settings):
    """The end token is the last token, whichever characters the text has."""
    encoded = prepare(settings("a😀" * 50, end_token=True))
    assert encoded.tokenizer == {"vocabulary": "a😀", "end_token": 2}
    assert tokens_of(encoded) == [0, 1] * 50 + [2]
    assert (encoded.length, encoded.dtype) == (101, "uint8")


def test_many_documents_in_one_chunk_and_many_chunks_in_one_document(monkeypatch):
    pytest.importorskip("tokenizers")
    from mingpt_ddp.data.tokenizers import bpe

    monkeypatch.setattr(bpe, "CHUNK_CHARS", 100)
    documents = ["to be, or not to be " * count for count in (0, 1, 30, 0, 2, 1, 0)]
    tokenizer = train_bpe(iter(END.join(documents)), 270).with_end()
    [*parts] = tokenizer.encode_stream(iter(END.join(documents)))
    assert documents_of(np.concatenate(parts).tolist(), tokenizer) == documents


def added(tokenizer: BPETokenizer, *names: str) -> BPETokenizer:
    """Return the tokenizer with these added tokens after its own tokens."""
    values: dict[str, Any] = json.loads(tokenizer.json)
    size = len(values["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    values["added_tokens"] = [
        {"id": size + i, "content": name, **flags} for i, name in enumerate(names)
    ]
    return BPETokenizer(json.dumps(values))


@pytest.mark.parametrize(
    ("names", "end"),
    [((), 260), (("<pad>",), 261), ((END_NAME, "<pad>"), 260), (("zz", "</s>"), 261)],
)
def test_a_given_tokenizer_keeps_its_own_end_token(names, end, settings, tmp_path):
    """The names of its special tokens are ordinary text if they occur in a document."""
    pytest.importorskip("tokenizers")
    given = added(train_bpe(iter(["to be or not to be " * 9]), 260), *names)
    (tmp_path / "tokenizer.json").write_text(given.json)
    path = str(tmp_path / "tokenizer.json")
    config = settings(directory(tmp_path), tokenizer=path, end_token=True)
    encoded = prepare(config)
    tokenizer = tokenizer_from_state(encoded.tokenizer)
    assert tokenizer.end == end
    assert tokenizer.vocab_size == max(end + 1, given.vocab_size)
    assert documents_of(tokens_of(encoded), tokenizer) == [*DOCUMENTS, ""]
    assert prepare_all(config, tokenizer)[""] == encoded  # the same tokenizer as in the file


def test_token_files_have_the_end_token_of_their_tokenizer(settings, tmp_path):
    pytest.importorskip("tokenizers")
    plain = train_bpe(iter(["to be or not to be " * 9]), 260)
    np.save(tmp_path / "train.npy", np.arange(1000, dtype=np.uint16) % 261)
    config = settings(tmp_path / "train.npy", format="tokens", end_token=True)
    unknown = [replace(config, vocab_size=261)]
    for name, tokenizer in (("plain", plain), ("ended", added(plain, END_NAME))):
        (tmp_path / f"{name}.json").write_text(tokenizer.json)
        unknown.append(replace(config, tokenizer=str(tmp_path / f"{name}.json")))
    ended = unknown.pop()
    encoded = prepare_all(ended)[""]
    assert tokenizer_from_state(encoded.tokenizer).end == 260
    for each in unknown:
        with pytest.raises(ConfigError, match=r"data.end_token=true needs a token that ends doc"):
            prepare_all(each)
