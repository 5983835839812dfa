"""Files of token ids: their headers, their splits, and the files that are refused."""

from __future__ import annotations

import gzip
import pickle
import re
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from mingpt_ddp.data.dataset import TextDataset
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import make_tar, make_zip, prepare

IDS = np.random.default_rng(1).integers(0, 50257, 1000)
BIN = IDS.astype(np.uint16).tobytes()
DOCS = Path(__file__).parents[3] / "docs/data.md"
LINE = "To be, or not to be: that is the question.\n"


def header(magic: int, version: int, length: int) -> bytes:
    """Return a file header in the format of llm.c."""
    return np.array([magic, version, length] + [0] * 253, np.int32).tobytes()


def packed(make, tmp_path: Path) -> bytes:
    return make(tmp_path / "packed", {"a.bin": BIN}).read_bytes()


@pytest.fixture
def ids(settings, tmp_path):
    """Return a function that makes a configuration for a token file."""

    def make(content: bytes | np.ndarray | Path, **changes):
        if isinstance(content, np.ndarray):
            path = tmp_path / "tokens.npy"
            np.save(path, content)
            content = path
        values = {"format": "tokens", "vocab_size": 50257, **changes}
        return settings(content, **values)

    return make


def splits(config) -> list[list[int]]:
    """Return the training, the validation and the test tokens."""
    data = TextDataset(prepare(config), config)
    return [np.array(part).tolist() for part in (data.train, data.val, data.test)]


def everything(config) -> list[int]:
    return [*chain(*splits(config))]


def test_tokens_without_a_header_are_split_at_the_end(ids):
    config = ids(BIN, dtype="uint16", test_split=0.05)
    assert splits(config) == [part.tolist() for part in np.split(IDS, [900, 950])]
    assert everything(replace(config, truncate=0.5)) == IDS[:500].tolist()
    with pytest.raises(DataError, match=r"data.truncate=1e-09 leaves nothing to train on"):
        prepare(replace(config, truncate=1e-9))
    assert everything(ids(IDS.astype(np.uint32).tobytes(), dtype="uint32")) == IDS.tolist()


@pytest.mark.parametrize(
    "content",
    [
        header(20240520, 1, 1000) + BIN,
        header(20240801, 7, 1000) + IDS.astype(np.uint32).tobytes(),
        *(IDS.astype(dtype) for dtype in ("uint16", "uint32", "int32", "int64")),
        (IDS % 256).astype(np.uint8),
    ],
    ids=["llm.c", "llm.c, llama 3", "uint16", "uint32", "int32", "int64", "uint8"],
)
def test_a_header_gives_the_dtype(content, ids):
    expected = content if isinstance(content, np.ndarray) else IDS
    assert everything(ids(content)) == expected.tolist()


NO_IDS = IDS.astype(np.int32)
NO_IDS[7] = -1


UINT16 = {"dtype": "uint16"}


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (BIN, {}, r"no header .* give data.dtype=uint16 \(nanoGPT\) or uint32$"),
        (BIN + b"x", UINT16, r"2,001 bytes, which is not a multiple of 2, the size of data.dtype"),
        (b"", UINT16, "has no tokens"),
        (LINE.encode() * 9, UINT16, "looks like text, not tokens; leave data.format"),
        (b"PAR1" + BIN, UINT16, "looks like Parquet, not tokens; read it with"),
        (BIN, UINT16 | {"vocab_size": 50000}, rf"9: {IDS.max()} at token {IDS.argmax()} of "),
        (NO_IDS, {}, r"has a token id that is not in 0 .. 50256: -1 at token 7 of .*tokens.npy"),
        (header(20240520, 1, 999) + BIN, {}, "3,024 bytes, but 3,022 according to its header"),
        (header(20240520, 2, 1000) + BIN, {}, "a header of version 2 .* write version 1"),
        (header(20240520, 1, 1000) + BIN, {"dtype": "uint32"}, "tokens of uint16, not data.dtype"),
        (IDS.reshape(2, 500), {}, "an array of int64 in 2 dimensions; save it in one"),
        (IDS.astype(">u2"), {}, "an array of >u2 in 1 dimensions"),
        (IDS.astype(float), {}, "an array of float64"),
        (np.array([{}]), {}, "cannot be read as a NumPy array: .* Python objects"),
        (partial(packed, make_zip), UINT16, "looks like a zip archive, not tokens; name the f"),
        (partial(packed, make_tar), UINT16, "looks like a tar archive, not tokens; name the f"),
        (gzip.compress(BIN, mtime=0), UINT16, "looks like gzip, not tokens; decompress"),
        (2 * IDS.astype(np.uint32).tobytes(), UINT16, "looks like tokens of uint32, "),
        (b"\x93NUMPY\x01\0", {}, "cannot be read as a NumPy array"),
    ],
)
def test_files_without_valid_tokens_are_refused(content, changes, message, ids, tmp_path):
    config = ids(content(tmp_path) if callable(content) else content, **changes)
    with pytest.raises(DataError, match=rf"^data error: data.path=\S+ .*{message}") as caught:
        prepare_all(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "needs data.vocab_size=N, the number of token ids, or data.tokeniz"),
        ({"tokenizer": "byte", "vocab_size": None}, "data.tokenizer=byte encodes texts; "),
        ({"tokenizer": "a.json"}, "data.vocab_size=50257 needs data.tokenizer=bpe"),
        ({"format": "text", "vocab_size": None}, "data.dtype=uint16 needs data.format=tokens"),
        ({"reader": "mine"}, "data.reader=mine yields text"),
    ],
)
def test_keys_that_contradict_each_other(changes, message, ids):
    with pytest.raises(ConfigError, match=message):
        prepare(ids(BIN, dtype="uint16", **changes))


def test_shards_are_read_in_the_order_of_their_names(ids, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, begin in (("b.bin", 300), ("a.bin", 0), ("c.npy", 600)):
        part = IDS[begin : begin + 300].astype(np.uint16)
        np.save(folder / name, part) if name == "c.npy" else part.tofile(folder / name)
    (folder / "README.md").write_text("tokens")
    for name in ("._a.bin", ".ipynb_checkpoints/a.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(BIN)
    config = ids(folder, dtype="uint16")
    encoded = prepare(config)
    assert everything(config) == IDS[:900].tolist()
    assert everything(replace(config, path=f"{folder}/[ab].bin")) == IDS[:600].tolist()
    assert [Path(file.path).name for file in encoded.files] == ["a.bin", "b.bin", "c.npy", "c.npy"]
    (IDS[:9] + 1).astype(np.uint16).tofile(folder / "b.bin")
    assert prepare(config).sha256 != encoded.sha256
    (folder / "a.bin").write_bytes(header(20240801, 7, 9) + IDS[:9].astype(np.uint32).tobytes())
    with pytest.raises(DataError, match=r"/c.npy has tokens of uint16, but \S+/a.bin has "):
        prepare(replace(config, dtype=None, path=f"{folder}/[ac].*"))
    for name in ("train_0.npy", "val_0.npy"):
        np.save(folder / name, IDS[:9].astype(np.uint16))
    with pytest.raises(DataError, match=r"several splits: 'train_0.npy', 'val_0.npy'; name each"):
        prepare(replace(config, path=f"{folder}/*_*"))
    with pytest.raises(DataError, match=r"has no files that end with \.bin or \.npy"):
        prepare(replace(config, path=str(tmp_path / "shards/*.md")))


def test_sources_splits_and_further_tokens(ids, tmp_path):
    for name, part in (("a", IDS[:300]), ("b", IDS[300:]), ("val", IDS[:50]), ("wiki", IDS[:9])):
        part.astype(np.uint16).tofile(tmp_path / name)
    sources = [(str(tmp_path / "a"), 3.0), (str(tmp_path / "b"), 1.0)]
    config = ids(BIN, dtype="uint16", sources=sources, val_paths={"wiki": str(tmp_path / "wiki")})
    texts = prepare_all(config)
    assert texts[""].parts == [[270, 630], [30, 70], [0, 0]]
    data = TextDataset(texts[""], config)
    expected = [*IDS[:270], *IDS[300:930]], [*IDS[270:300], *IDS[930:]]
    assert np.array(data.train).tolist() == expected[0]
    assert np.array(data.val).tolist() == expected[1]
    assert np.array(TextDataset(texts["wiki"], config).whole).tolist() == IDS[:9].tolist()
    given = replace(config, sources=None, split_paths={"val": str(tmp_path / "val")})
    assert splits(given) == [IDS.tolist(), IDS[:50].tolist(), []]
    np.save(tmp_path / "c.npy", IDS)
    with pytest.raises(DataError, match=r"data.split_paths.val=\S+ has tokens of int64"):
        prepare(replace(given, split_paths={"val": str(tmp_path / "c.npy")}))


def test_shakespeare_char_of_nanogpt(ids, settings, tmp_path, monkeypatch):
    """Files as nanoGPT's data/shakespeare_char/prepare.py writes them work as docs/data.md says."""
    text = LINE * 20 + "äöü"
    chars = sorted(set(text))
    stoi = {ch: i for i, ch in enumerate(chars)}
    itos = dict(enumerate(chars))
    n = int(len(text) * 0.9)
    for name, part in (("train", text[:n]), ("val", text[n:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    meta = {"vocab_size": len(chars), "itos": itos, "stoi": stoi}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(import json, pickle\n.*?)```", DOCS.read_text(), re.DOTALL)
    exec(code, {})
    config = ids(
        tmp_path / "train.bin",
        dtype="uint16",
        vocab_size=None,
        tokenizer=str(tmp_path / "meta.json"),
        split_paths={"val": str(tmp_path / "val.bin")},
    )
    of_text = settings(text)
    assert splits(config) == splits(of_text)
    assert prepare(config).tokenizer == prepare(of_text).tokenizer
    assert splits(replace(of_text, tokenizer=config.tokenizer)) == splits(of_text)


def test_openwebtext_of_nanogpt(ids, tmp_path):
    """nanoGPT's data/openwebtext/prepare.py ends each document with an end-of-text token."""
    pytest.importorskip("tokenizers")
    from mingpt_ddp.data.tokenizers.bpe import train_bpe

    documents = [LINE * 3, "ein anderer Text\n", "漢字 😀"]
    encoder = train_bpe(iter(documents), 280).with_end()
    (tmp_path / "tokenizer.json").write_text(encoder.json)
    expected = [token for each in documents for token in (*encoder.encode(each), encoder.end)]
    np.array(expected, np.uint16).tofile(tmp_path / "train.bin")
    path = str(tmp_path / "tokenizer.json")
    config = ids(tmp_path / "train.bin", dtype="uint16", vocab_size=None, tokenizer=path)
    assert everything(config) == expected
    tokenizer = tokenizer_from_state(prepare(config).tokenizer)
    assert tokenizer.decode(expected).replace("<|endoftext|>", "") == "".join(documents)
    np.array([*expected, encoder.vocab_size], np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"at token \d+ of \S+; set data.tokenizer"):
        prepare(config)


def test_a_remote_file_is_mapped_in_the_cache(ids):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://tokens/train.bin", "wb") as file:
        file.write(BIN)
    config = replace(ids(BIN, dtype="uint16"), path="memory://tokens/train.bin")
    assert everything(config) == IDS.tolist()
    assert prepare(config).files[0].path.startswith(str(config.cache_dir))
