"""A file that an earlier start has read is not read again, unless it may have changed."""

from __future__ import annotations

import http.server
import json
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mingpt_ddp.config import builders
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data import known_files
from mingpt_ddp.data.known_files import RECORDS, SMALL_BYTES
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text import text_cache
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import make_directory, make_zip

LINE = "To be, or not to be: that is the question.\n"
TEXT = LINE * (SMALL_BYTES // len(LINE) + 1)
LATER_NS = 10_000_000_000


@pytest.fixture
def later(monkeypatch):
    """Let ten seconds pass since the files were written, for the package alone."""
    now = known_files.time.time_ns
    monkeypatch.setattr(known_files.time, "time_ns", lambda: now() + LATER_NS)


@pytest.fixture
def hashed(monkeypatch):
    """What is hashed: "text" and "tokens"."""
    found: list[str] = []
    of_text, of_tokens = text_cache.sha256_of, text_cache._sha256_of_file

    def hash_text(text):
        found.append("text")
        return of_text(text)

    def hash_tokens(path):
        found.append("tokens")
        return of_tokens(path)

    monkeypatch.setattr(text_cache, "sha256_of", hash_text)
    monkeypatch.setattr(text_cache, "_sha256_of_file", hash_tokens)
    return found


def start(config: DataConfig, hashed: list[str]) -> list[str]:
    """Return what a start hashes."""
    hashed.clear()
    prepare_all(config)
    return list(hashed)


def in_place(path: Path, at: int = 10) -> None:
    """Change a letter; the size and the inode stay."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"X")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("form", ["file", "directory", "archive"])
def test_what_was_read_is_not_read_again(form, settings, tmp_path, hashed, log_lines):
    path: str | Path = TEXT
    files = {"a.txt": TEXT.encode(), "b.png": b"\x89PNG\r\n\x1a\n"}
    if form == "directory":
        path = make_directory(tmp_path / "texts", files)
    elif form == "archive":
        path = make_zip(tmp_path / "texts.zip", files, zipfile.ZIP_STORED)
    config = settings(path)
    assert start(config, hashed) == ["text", "text", "tokens"]
    first = prepare_all(config)
    lines = list(log_lines)
    log_lines.clear()
    assert start(config, hashed) == []
    assert prepare_all(config) == first
    assert log_lines == lines, "what is read and skipped is said again"
    other = replace(config, block_size=4, train_split=0.5)
    assert start(other, hashed) == [], "of another configuration of the same text"
    assert start(replace(config, verify="always"), hashed) == ["text", "tokens"]
    sha256 = first[""].sha256
    assert start(replace(config, sha256=sha256), hashed) == ["text"]
    if form == "directory":
        assert "skipped 1 PNG" in lines[-2]
        (tmp_path / "texts/c.txt").write_text(LINE)
        assert start(config, hashed)[0] == "text"


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path),
        in_place,
        lambda path: path.with_name("new").write_text(TEXT.lower()) and replace_with_times(path),
        lambda path: (in_place(path), os.utime(path, ns=(0, 0))),
    ],
    ids=["touched", "in place", "replaced, with its mtime", "in place, with its mtime"],
)
def test_a_change_is_found(change, settings, hashed):
    config = settings(TEXT)
    path = Path(config.path)
    os.utime(path, ns=(0, 0))
    before = prepare_all(config)[""].sha256
    assert start(config, hashed) == []
    change(path)
    assert start(config, hashed)[0] == "text"
    assert (prepare_all(config)[""].sha256 == before) == (path.read_text() == TEXT)


def replace_with_times(path: Path) -> None:
    """Put the new file in the place of the old one, with its modification time."""
    new = path.with_name("new")
    times = path.stat().st_mtime_ns
    os.utime(new, ns=(times, times))
    os.replace(new, path)


def test_a_file_written_within_two_seconds_is_read_again(settings, hashed):
    config = settings(TEXT)
    start(config, hashed)
    assert not (Path(config.cache_dir) / RECORDS).exists()
    assert start(config, hashed) == ["text", "tokens"]


def test_long_tokens_are_recorded_when_they_are_written(settings, hashed, monkeypatch):
    """The encoding waits until they are two seconds old."""
    monkeypatch.setattr(text_cache, "LONG_BYTES", 0)
    slept_ns = [0]
    now = known_files.time.time_ns
    monkeypatch.setattr(known_files.time, "time_ns", lambda: now() + sum(slept_ns))
    monkeypatch.setattr(known_files.time, "sleep", lambda s: slept_ns.append(int(s * 1e9)))
    config = settings(TEXT)
    start(config, hashed)
    assert start(config, hashed) == ["text"]


@pytest.mark.usefixtures("later")
def test_tokens_that_were_written_to_are_encoded_again(settings, hashed):
    config = settings(TEXT)
    first = prepare_all(config)
    in_place(Path(first[""].directory) / "tokens.bin")
    assert start(config, hashed) == ["tokens", "tokens", "text", "tokens"]
    assert prepare_all(config) == first
    assert start(config, hashed) == []


def with_digest(records: object) -> bytes:
    return json.dumps({"files": records, "digest": known_files.digest_of(records)}).encode()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"\xff{",
        lambda content: content.replace(b"a", b"b", 1),
        lambda content: b"[" * 100_000,
        lambda content: b"[1, 2]",
        lambda content: with_digest([1]),
        lambda content: with_digest({key: 1 for key in json.loads(content)["files"]}),
        lambda content: with_digest(
            {
                key: [state, {"sha256": 5}]
                for key, (state, _) in json.loads(content)["files"].items()
            }
        ),
    ],
    ids=["empty", "no JSON", "flipped", "deep", "list", "no records", "no pairs", "no hash"],
)
def test_a_damaged_record_means_reading(damage, settings, hashed):
    config = settings(TEXT)
    first = prepare_all(config)
    record = Path(config.cache_dir) / RECORDS
    record.write_bytes(damage(record.read_bytes()))
    assert start(config, hashed) == ["text", "tokens"]
    assert start(config, hashed) == []
    assert prepare_all(config) == first


@pytest.mark.usefixtures("later")
def test_a_text_that_is_not_what_was_recorded_is_found_while_it_is_encoded(settings, hashed):
    """Once, by a change that left no trace; the next start reads it."""
    config = settings(TEXT)
    prepare_all(config)
    record = Path(config.cache_dir) / RECORDS
    records = json.loads(record.read_bytes())["files"]
    for _, value in records.values():
        value["sha256"] = "0" * 64
    record.write_bytes(with_digest(records))
    with pytest.raises(DataError, match="changed while being read; run again"):
        prepare_all(config)
    assert "text" in start(config, hashed)


@pytest.mark.usefixtures("later")
def test_the_oldest_records_are_dropped(settings, hashed, monkeypatch):
    monkeypatch.setattr(known_files, "MAX_RECORDS", 2)  # of a text and its tokens
    old, new = settings(TEXT), settings(TEXT)
    new = replace(new, path=str(Path(old.path).with_name("new.txt")))
    Path(new.path).write_text(TEXT.upper())
    for config in (old, new):
        prepare_all(config)
    assert start(new, hashed) == []
    assert start(old, hashed)[0] == "text"


@pytest.fixture
def server(monkeypatch):
    """A web server of one text with an ETag; `loads` counts the downloads."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        content = TEXT.encode()
        etag = '"1"'
        loads = 0

        def do_HEAD(self):
            self.send_response(200)
            self.send_header("ETag", self.etag)
            self.send_header("Content-Length", str(len(self.content)))
            self.end_headers()

        def do_GET(self):
            Handler.loads += 1
            self.do_HEAD()
            self.wfile.write(self.content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.02,))
        thread.start()
        Handler.url = f"http://127.0.0.1:{web.server_port}/text.txt"
        yield Handler
        web.shutdown()
        thread.join()


@pytest.mark.usefixtures("later")
def test_a_download_is_kept_while_its_etag_is_the_same(settings, hashed, server):
    config = settings("", path=server.url)
    first = prepare_all(config)
    assert (start(config, hashed), server.loads) == ([], 1)

    download = next(Path(config.cache_dir).glob("downloads/*"))
    in_place(download)
    assert prepare_all(config) == first
    assert server.loads == 2, "a damaged download"
    assert (start(config, hashed), server.loads) == ([], 2)

    start(replace(config, verify="always"), hashed)
    assert server.loads == 3

    server.content = TEXT.upper().encode()
    server.etag = '"2"'
    assert prepare_all(config)[""].sha256 != first[""].sha256
    assert server.loads == 4

    server.etag = 'W/"2"'
    for loads in (5, 6):
        prepare_all(config)
        assert server.loads == loads, "a weak ETag is not of the bytes"


READER = """
from mingpt_ddp.registry import DataConfig, register

@register("data", "own", DataConfig, files=lambda config: [config.path])
def own(config):
    with open("calls", "a") as file:
        file.write(".")
    yield open(config.path).read()
"""


@pytest.mark.usefixtures("later")
def test_a_reader_that_names_its_files_is_called_again_once_they_change(
    settings, hashed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    config = replace(settings(TEXT), reader="own")

    def calls(content: str) -> int:
        """Return how often a new process calls the reader."""
        code.write_text(content)
        monkeypatch.setattr(builders, "_files", {})
        builders.BUILDERS["data"].pop("own", None)
        builders._configs("data").pop("own", None)
        builders.run_file(code, "data.code")
        Path("calls").write_text("")
        prepare_all(config)
        return len(Path("calls").read_text())

    try:
        assert calls(READER) > 0
        assert calls(READER) == 0
        assert calls(READER + "# other\n") == 1
        in_place(Path(config.path))
        assert calls(READER + "# other\n") > 1
        assert calls(READER.replace(", files=lambda config: [config.path]", "")) == 1
        assert calls(READER.replace("[config.path]", "['nowhere']")) == 1
    finally:
        builders.BUILDERS["data"].pop("own", None)
        builders._configs("data").pop("own", None)
    with pytest.raises(ValueError, match="only a reader of text has files"):
        builders.register("model", "own", builders.ModelConfig, files=lambda config: [])
