"""Encoding texts as token ids, for every source and chunk size, with and without a cache."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mingpt_ddp.config import builders
from mingpt_ddp.data import download
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.text import text as text_module
from mingpt_ddp.data.text.sources import python_docs
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import decoded, prepare, tokens_of

BOM = b"\xef\xbb\xbf"
LINE = "To be, or not to be: that is the question. 123 äöß € 漢字 😀\n"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("{tmp}/xdg", "xdg/mingpt_ddp"), ("relative", "home/.cache/mingpt_ddp"), (None, None)],
)
def test_the_cache_is_the_users_by_default(variable, expected, settings, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable.format(tmp=tmp_path))
    encoded = prepare(replace(settings(LINE), cache_dir=None))
    assert Path(encoded.directory).parent == tmp_path / (expected or "home/.cache/mingpt_ddp")
    assert decoded(encoded) == LINE
    assert os.listdir() == []


def test_python_docs_needs_no_download(settings):
    text = python_docs()
    assert 460_000 <= len(text) <= 600_000
    assert decoded(prepare(settings("", path="builtin:python_docs"))) == text


def test_utf8_is_encoded_by_code_point_order(settings):
    encoded = prepare(settings(LINE))
    assert encoded.tokenizer["vocabulary"] == "".join(sorted(set(LINE)))
    assert encoded.length == len(LINE)
    assert encoded.sha256 == hashlib.sha256(LINE.encode()).hexdigest()
    assert decoded(encoded) == LINE


@pytest.mark.parametrize("head", [b"", BOM], ids=["plain", "bom"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gzip"])
def test_characters_split_by_a_chunk_are_joined(settings, monkeypatch, head, pack):
    """The text is read in chunks, and a character of several bytes may be split between two.

    gzip is detected by the content of the file, not by its name.
    """
    for chunk in (1, 2, 3, 5, 64):
        monkeypatch.setattr(text_module, "CHUNK_BYTES", chunk)
        characters = random.Random(chunk).choices("ab\n\r€é漢😀\U0010ffff\x00\ufeff", k=200)
        text = "x" + "".join(characters)
        encoded = prepare(settings(pack(head + text.encode()), format="text"))  # it contains NULs
        assert decoded(encoded) == text
        assert encoded.length == len(text)


@pytest.mark.parametrize(
    ("content", "position"),
    [
        (b"abc\xffdef", 3),
        (b"\xff", 0),
        ("ä€😀".encode() + b"\x80a", 9),
        ("ä".encode() + b"ab\xe2\x82", 4),  # the last byte of a character is missing
        (b"ab\xe2\x28\xa1cd", 2),  # the second byte is wrong
        (b"ab\xed\xa0\x80", 2),  # a surrogate
        (BOM + b"abc\xffdef", 6),
        (BOM + b"\xe2\x82", 3),
        (BOM[:2], 0),  # half a byte order mark
    ],
)
def test_invalid_utf8_is_refused_with_the_position_of_the_byte(
    settings, monkeypatch, content, position
):
    config = settings(content)
    for chunk in (1, 2, 3, 5, 1 << 22):
        monkeypatch.setattr(text_module, "CHUNK_BYTES", chunk)
        with pytest.raises(DataError, match=rf"is not UTF-8 at byte {position};"):
            prepare(config)
    assert not list(Path(config.cache_dir).glob("*/meta.json"))


GZIP = gzip.compress(LINE.encode() * 20, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GZIP[:-20], "is damaged or cut off"),
        (GZIP[:-8] + b"\0\0\0\0" + GZIP[-4:], "is damaged or cut off"),  # a wrong checksum
        (GZIP[:10] + b"\xff" + GZIP[11:], "is damaged or cut off"),  # an invalid block type
        (b"", "is empty"),
        (BOM, "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        ("a", "one distinct character"),
        ("a" * 1000, "one distinct character"),
        (Path("nowhere.txt"), "there is no such file"),
    ],
)
def test_a_file_without_a_usable_text_gives_one_line(settings, content, message):
    with pytest.raises(DataError, match=message):
        prepare(settings(content))


@pytest.mark.parametrize(
    ("distinct", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_a_token_takes_as_many_bytes_as_it_needs(settings, distinct, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + distinct))) * 2
    encoded = prepare(settings(text))
    assert encoded.dtype == dtype
    assert tokens_of(encoded) == [*range(distinct), *range(distinct)]


# The cache


def stamp(encoded: EncodedText) -> list[tuple[int, int]]:
    """Return the inode and modification time of each file in the cache and of its directory."""
    directory = Path(encoded.directory)
    paths = [directory.parent, directory, *sorted(directory.iterdir())]
    return [((status := path.stat()).st_ino, status.st_mtime_ns) for path in paths]


def test_the_lock_is_not_a_link(settings, tmp_path):
    config = settings(LINE)
    Path(config.cache_dir).mkdir(exist_ok=True)
    (tmp_path / "victim").write_text("precious")
    (Path(config.cache_dir) / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(
        DataError, match=r"cannot write the encoded text to data.cache_dir=.*; choose another d"
    ):
        prepare(config)
    assert (tmp_path / "victim").read_text() == "precious"


def truncate_tokens(directory: Path) -> None:
    with open(directory / "tokens.bin", "r+b") as file:
        file.truncate(10)


def flip_a_letter(directory: Path) -> None:
    """The vocabulary stays sorted and distinct."""
    content = (directory / "meta.json").read_bytes()
    assert content.count(b"Tabe") == 1
    (directory / "meta.json").write_bytes(content.replace(b"Tabe", b"Tabd"))


def write_meta(content: bytes):
    return lambda directory: (directory / "meta.json").write_bytes(content)


WRONG_VALUES = (
    b'{"sha256": "0", "length": 10, "tokenizer": {"vocabulary": "ab"}, "dtype": "nonsense"}'
)


@pytest.mark.parametrize(
    "damage",
    [
        truncate_tokens,
        lambda directory: (directory / "tokens.bin").unlink(),
        lambda directory: (directory / "meta.json").unlink(),
        flip_a_letter,
        *map(write_meta, (b"\xff\xfe garbage", b"", b"null", b'{"length": 3}', WRONG_VALUES)),
    ],
)
def test_a_damaged_cache_is_rebuilt(settings, damage):
    config = settings(LINE)
    encoded = prepare(config)
    damage(Path(encoded.directory))
    assert prepare(config) == encoded
    assert decoded(encoded) == LINE
    before = stamp(encoded)
    assert prepare(config) == encoded
    assert stamp(encoded) == before


@pytest.mark.parametrize("damaged", [False, True], ids=["no cache yet", "damaged cache"])
def test_several_starts_at_the_same_time(settings, damaged):
    """Each start gets a complete encoding, and no partial files are left.

    Threads stand in for processes: each one opens the lock file by itself.
    """
    text = LINE * 5_000
    config = settings(text)
    if damaged:
        write_meta(b"garbage")(Path(prepare(config).directory))
    with ThreadPoolExecutor() as pool:
        outcomes = [*pool.map(prepare, [config] * 4)]
    assert outcomes == [prepare(config)] * 4
    assert decoded(outcomes[0]) == text
    assert not list(Path(config.cache_dir).glob(".partial-*"))


# Remote texts


SHA256 = hashlib.sha256(LINE.encode()).hexdigest()


def test_a_remote_file_is_fetched_once(settings, server, monkeypatch):
    """If data.sha256 is set, a second run uses the cached copy, even if the server is gone.

    It does not even import the download library.
    """
    server.content = LINE.encode()
    config = settings("", path=server.url, sha256=SHA256)
    encoded = prepare(config)
    assert decoded(encoded) == LINE
    assert server.loads == 1
    assert prepare(config) == encoded
    assert server.loads == 1
    server.close()
    with monkeypatch.context() as patched:
        patched.setattr(download, "open_filesystem", None)
        assert prepare(config) == encoded
    with pytest.raises(DataError, match=r"if there is no network, name a local copy"):
        prepare(replace(config, path=server.url + "?other"))


def test_a_file_with_another_sha256_is_downloaded_again_and_never_deleted_elsewhere(
    settings, server
):
    """Otherwise a damaged download would be used forever. A file of the user is never deleted."""
    server.content = LINE.encode()
    config = settings("", path=server.url, sha256=SHA256)
    prepare(config)
    [loaded] = Path(config.cache_dir).glob("downloads/*-text.txt")
    loaded.write_text(LINE.lower())
    own = settings(LINE.lower(), sha256=SHA256)
    for refused in (config, own):
        with pytest.raises(DataError, match=f"not data[.]sha256={SHA256}"):
            prepare(refused)
    assert Path(own.path).read_text() == LINE.lower()
    assert decoded(prepare(config)) == LINE
    assert server.loads == 2


def test_a_remote_file_with_another_sha256_leaves_nothing(settings, server):
    server.content = LINE.encode()
    config = settings("", path=server.url, sha256="0" * 64)
    with pytest.raises(DataError, match=r"has SHA-256 .*, not data[.]sha256=0000"):
        prepare(config)
    with pytest.raises(DataError, match="there is no such file"):
        prepare(settings("", path=server.url.replace("text", "nowhere")))
    assert [path for path in Path(config.cache_dir).rglob("*") if path.is_file()] == []


# User readers


@pytest.fixture
def own(settings, monkeypatch):
    """Return a function that registers a reader and returns a configuration that uses it."""

    def make(reader, **changes):
        monkeypatch.setitem(builders.BUILDERS["data"], "own", reader)
        return settings(LINE, reader="own", **changes)

    return make


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_pieces_are_encoded_like_a_file(settings, own, monkeypatch, tmp_path, size):
    """Pieces may be empty, longer than a chunk, or have characters of several bytes."""
    monkeypatch.setattr(text_module, "CHUNK_BYTES", 64)
    text = LINE * 50
    as_file = prepare(settings(text))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    config = own(lambda config: iter(["", *pieces, ""]), cache_dir=str(tmp_path / "own"))
    encoded = prepare(config)
    assert decoded(encoded) == text
    assert (encoded.sha256, encoded.tokens_sha256) == (as_file.sha256, as_file.tokens_sha256)


def test_a_reader_runs_once_when_its_text_is_cached(own):
    calls = []
    config = own(lambda config: calls.append(config.path) or iter([LINE * 10]), path="somewhere")
    first = prepare(config)
    known = len(calls)
    assert prepare(config) == first
    assert (known, len(calls)) == (2, 3)


NUMBERS = itertools.count()


@pytest.mark.parametrize(
    ("reader", "path", "message"),
    [
        (lambda config: iter([LINE, "1" * next(NUMBERS)]), "a", "data.path=a changed while being"),
        (
            lambda config: Path("no").read_text(),
            "b.txt",
            "own cannot read data.path=b.txt: .*No su",
        ),
        (lambda config: Path("no").read_text(), None, "own cannot read its text: .*No such file"),
    ],
)
def test_a_reader_that_cannot_read(own, reader, path, message):
    """The error names data.path, or the reader if it has no path."""
    with pytest.raises(DataError, match=rf"^data error: .*{message}"):
        prepare(own(reader, path=path))
