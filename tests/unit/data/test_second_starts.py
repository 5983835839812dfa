"""A text that an earlier start has read is read again only if it may have changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mingpt_ddp.config.builders import register, run_file
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.keys.model_config import ModelConfig
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import decoded, make_directory, make_zip

LINE = "To be, or not to be: that is the question.\n"
TEXT = LINE * 100_000  # much longer than the head by which its format is detected
LATER_NS = 10_000_000_000


@pytest.fixture
def later(monkeypatch):
    """Set the clock to ten seconds after the files were written."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + LATER_NS)


def start(config: DataConfig) -> int:
    """Start with this text. Return how many times its size this process reads meanwhile."""
    before = bytes_read()
    prepare_all(config)
    return round((bytes_read() - before) / len(TEXT))


def bytes_read() -> int:
    [count] = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(count)


def change_in_place(path: Path, at: int = 10) -> None:
    """Change a letter without changing the size or the inode."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"X")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("form", ["file", "directory", "archive"])
def test_an_unchanged_text_is_not_read_again(form, settings, tmp_path):
    """The first start reads the text twice and its tokens once. Every start logs the same."""
    path: str | Path = TEXT
    files = {"a.txt": TEXT.encode(), "b.png": b"\x89PNG\r\n\x1a\n"}
    if form == "directory":
        path = make_directory(tmp_path / "texts", files)
    elif form == "archive":
        path = make_zip(tmp_path / "texts.zip", {"a.txt": TEXT.encode()})
    config = settings(path)
    if form == "archive":
        config = replace(config, path=f"zip://*.txt::{path}")
    assert start(config) == 3
    first = prepare_all(config)
    assert start(config) == 0
    assert prepare_all(config) == first
    assert start(replace(config, block_size=4, train_split=0.5)) == 0
    assert start(replace(config, verify="always")) >= 2
    # An archive counts as another download if data.sha256 is set.
    assert start(replace(config, sha256=first[""].sha256)) in (0, 3)
    with pytest.raises(DataError, match=f"has SHA-256 {first[''].sha256}, not data.sha256=000"):
        prepare_all(replace(config, sha256="0" * 64))
    if form == "directory":
        assert "skipped 1 file that looks like binary data" in first[""].notes[0]
        (tmp_path / "texts/c.txt").write_text(LINE)
        assert start(config) >= 3


CHANGES = {
    "touched": os.utime,
    "in place": change_in_place,
    "replaced, with its mtime": lambda path: replace_with_times(path),
    "in place, with its mtime": lambda path: (change_in_place(path), os.utime(path, ns=(0, 0))),
}


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(change, settings):
    config = settings(TEXT)
    path = Path(config.path)
    os.utime(path, ns=(0, 0))
    before = prepare_all(config)[""].sha256
    assert start(config) == 0
    CHANGES[change](path)
    assert start(config) >= 2
    assert (prepare_all(config)[""].sha256 == before) == (change == "touched")


def replace_with_times(path: Path) -> None:
    """Replace the file by a new one with the same modification time."""
    new = path.with_name("new")
    new.write_text(TEXT.lower())
    os.utime(new, ns=(0, 0))
    os.replace(new, path)


def test_a_file_is_read_until_a_write_could_no_longer_be_missed(settings, monkeypatch):
    """A second write within two seconds might not change the file's modification time."""
    config = settings(TEXT)
    status = os.stat(config.path)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: status.st_mtime_ns + 1_000_000_000)
    first = prepare_all(config)
    assert start(config) == 1
    change_in_place(Path(config.path))
    real = os.stat
    same = lambda path, **options: status if path == Path(config.path) else real(path, **options)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", same)
        changed = prepare_all(config)[""]
    assert changed.sha256 != first[""].sha256 and decoded(changed)[10] == "X"
    monkeypatch.setattr(time, "time_ns", lambda: now() + LATER_NS)
    assert (start(config) >= 1, start(config)) == (True, 0)


@pytest.mark.usefixtures("later")
def test_tokens_that_were_written_to_are_encoded_again(settings):
    config = settings(TEXT)
    first = prepare_all(config)
    tokens = Path(first[""].directory) / "tokens.bin"
    content = tokens.read_bytes()
    change_in_place(tokens)
    assert prepare_all(config) == first
    assert tokens.read_bytes() == content
    os.utime(tokens)  # a copied cache has new modification times
    assert start(config) == 1


@pytest.mark.parametrize("form", ["text", "documents", "rows", "splits"])
@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_the_cache_records_the_origin_of_tokens(form, tokenizer, settings, tmp_path):
    """sources.bin has the first token of each document, and of each piece that a split cuts off."""
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    names = ["a.txt", "b.txt", "c.txt"]
    texts = [f"größer {name} " * 30 + "end" for name in names]
    if form == "rows":
        texts = [f"größer {i}" for i in range(90)]
        rows = [f'{{"text": "{text}"}}\n' for text in texts]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(rows))
    else:
        path = make_directory(
            tmp_path / "texts", {n: t.encode() for n, t in zip(names, texts, strict=True)}
        )
    config = settings(path, tokenizer=tokenizer, end_token=form == "documents", train_split=0.7)
    if form == "splits":
        config = replace(config, split_paths={"test": str(tmp_path / "texts/b.txt")})
    encoded = prepare_all(config)[""]
    directory = Path(encoded.directory)
    files = json.loads((directory / "meta.json").read_text())["entry"]["files"]
    tokens = np.fromfile(directory / "tokens.bin", encoded.dtype)
    table = np.fromfile(directory / "sources.bin", np.int64).reshape(-1, 4)
    sizes = tokenizer_from_state(encoded.tokenizer).token_sizes
    assert (np.diff(table[:, 0]) >= 0).all()
    begins = table[:, 0].tolist()
    for (begin, file, number, byte), end in zip(table, [*begins[1:], len(tokens)], strict=True):
        text = texts[number - 1] if form == "rows" else Path(files[file]).read_text()
        rest = text.encode()[byte:]
        decoded = tokenizer_from_state(encoded.tokenizer).decode(tokens[begin:end].tolist())
        if tokenizer != "bpe":
            assert (rest + b"\n").startswith(decoded.encode())
        else:  # a BPE token may begin before a document and end after it
            assert decoded.encode().strip()[:3] in rest[: sizes[tokens[begin]] + 3]
    documents = {(file, number) for _, file, number, _ in table.tolist()}
    assert len(documents) == len(texts) + (form == "splits")


@pytest.mark.usefixtures("later")
def test_a_download_is_kept_while_its_etag_is_the_same(settings, server):
    server.content, server.etag = TEXT.encode(), '"1"'
    config = settings("", path=server.url)
    first = prepare_all(config)
    assert (start(config), server.loads) == (0, 1)

    prepare_all(replace(config, verify="always"))
    assert server.loads == 2

    server.content = TEXT.upper().encode()
    server.etag = '"2"'
    changed = prepare_all(config)
    assert changed[""].sha256 != first[""].sha256
    assert server.loads == 3

    # A weak ETag does not identify the bytes, so the text is downloaded again. Equal bytes are
    # not encoded again.
    server.etag = 'W/"2"'
    known = prepare_all(config)
    assert start(config) == 2  # reads both downloads to compare them
    assert (prepare_all(config), server.loads) == (known, 6)


READER = """
from mingpt_ddp.registry import DataConfig, register

@register("data", "own", DataConfig, files=lambda config: [config.path])
def own(config):
    with open("calls", "a") as file:
        file.write(".")
    yield open(config.path).read()
"""


def start_in_process(code: Path, config: DataConfig) -> None:
    run_file(code, "data.code")
    prepare_all(config)


@pytest.mark.usefixtures("later")
def test_a_reader_that_names_its_files_is_called_again_once_they_change(
    settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    config = replace(settings(LINE), reader="own")

    def calls(content: str) -> int:
        """Return the number of times that a new process calls the reader."""
        code.write_text(content)
        Path("calls").write_text("")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
            process.submit(start_in_process, code, config).result()
        return len(Path("calls").read_text())

    assert (calls(READER), calls(READER)) == (2, 0)
    assert calls(READER + "# other\n") == 2
    change_in_place(Path(config.path))
    assert calls(READER + "# other\n") == 2
    unknown = READER.replace(", files=lambda config: [config.path]", "")
    assert (calls(unknown), calls(unknown)) == (2, 1)
    with pytest.raises(DataError, match="there is no such file"):
        calls(READER.replace("[config.path]", "['nowhere']"))
    with pytest.raises(ValueError, match="files is only for a reader of text"):
        register("model", "own", ModelConfig, files=lambda config: [])
