"""Directories, globs and archives of texts, and damaged archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import tarfile
import zipfile
from pathlib import Path

import fsspec
import pytest

from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text import archives
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import make_directory, make_tar, make_zip, prepare, text_of

FILES = {"b/2.txt": b"second\n", "a.txt": b"first", "b/10.md": "dritter: ß".encode()}
JOINED = "first\ndritter: ß\nsecond\n"  # sorted by name, a line feed after each


def every_form(root: Path, files=FILES) -> list[Path]:
    tar = make_tar(root / "x.tar.gz", files, "w:gz")
    return [
        make_directory(root / "texts", files),
        make_zip(root / "x.zip", files),
        make_tar(root / "x.tar", files),
        tar,
    ]


def test_texts_are_joined_in_the_order_of_their_names(settings, tmp_path):
    forms = [*every_form(tmp_path), make_zip(tmp_path / "lzma.zip", FILES, zipfile.ZIP_LZMA)]
    for path in forms:
        assert text_of(settings(path)) == JOINED
    assert text_of(settings(tmp_path / "texts/**/*.txt")) == "first\nsecond\n"
    (tmp_path / "texts/b/2.txt").write_bytes(gzip.compress(b"\xef\xbb\xbfsecond"))
    assert text_of(settings(tmp_path / "texts")) == JOINED
    assert len({prepare(settings(path)).directory for path in forms}) == 1  # one cache, by content


def test_hidden_and_binary_files_are_skipped_with_a_line(settings, tmp_path, caplog):
    files = {
        **FILES,
        ".git/config": b"hidden",
        "image.png": b"\x89PNG\r\n\x1a\n",
        "latin.txt": b"\xe4bc",
        "nul.bin": b"\1\0",
    }
    for path in every_form(tmp_path, files):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert text_of(settings(path)) == JOINED
        read, skipped, form = [record.getMessage() for record in caplog.records]
        assert form == f"data.path={path}: read with data.format=text"
        assert read == (
            f"data.path={path}: reads 3 files of 23 bytes: 2 .txt ('a.txt', 'b/2.txt'), "
            "1 .md ('b/10.md')"
        )
        assert skipped == (
            f"data.path={path}: skipped 1 PNG ('image.png'), 1 hidden ('.git/config'), "
            "1 not UTF-8 ('latin.txt'), 1 binary data with NUL bytes, such as tokens ('nul.bin')"
        )
    for name in files.keys() & FILES.keys():
        (tmp_path / "texts" / name).unlink()
    with pytest.raises(
        DataError, match=r"has no texts: skipped 1 PNG .*, 1 hidden .*; extract its text first"
    ):
        prepare(settings(tmp_path / "texts"))


def test_names_are_labels_only(settings, tmp_path):
    """A member may be called anything: nothing is written outside of the cache."""
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    path = make_tar(tmp_path / "x.tar", {"../../escape.txt": b"abc\n", "/etc/escape": b"def\n"})
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, str(outside)
            archive.addfile(info)
    assert text_of(settings(path)) == "abc\ndef\n"
    assert text_of(settings(make_zip(tmp_path / "x.zip", {"../escape.txt": b"abc\n"}))) == "abc\n"
    assert not [*tmp_path.parent.glob("escape*")] and not Path("/etc/escape").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"outside.txt", "x.tar", "x.zip", "cache"}


@pytest.mark.parametrize("make", [make_zip, lambda path, files: make_tar(path, files, "w:gz")])
def test_bombs_are_bounded(make, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MIN_EXPANDED_BYTES", 1 << 16)
    path = make(tmp_path / "bomb", {f"{i}.txt": b"a" * (1 << 20) for i in range(4)})
    with pytest.raises(DataError, match=r"expands to over [0-9,]+ bytes; .*unpack it yourself"):
        prepare(settings(path))


def gzip_bomb(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"to be or not to be\n" * 4000))
    return path


def test_a_gzip_file_that_expands_too_far(settings, tmp_path, monkeypatch):
    """Alone, by a glob, and in a directory; nothing is left in the cache."""
    monkeypatch.setattr(archives, "MIN_EXPANDED_BYTES", 1 << 14)
    (tmp_path / "many").mkdir()
    bomb = gzip_bomb(tmp_path / "many" / "bomb.gz")
    for path in (bomb, tmp_path / "many", tmp_path / "many" / "*.gz"):
        with pytest.raises(
            DataError, match=r"expands to over [0-9,]+ bytes; raise data.max_expansion"
        ):
            prepare_all(settings(path))
        assert not (tmp_path / "cache").exists()
        assert (
            prepare(settings(path, max_expansion=1000.0, cache_dir=str(tmp_path / "other"))).length
            == 76000
        )


def test_the_whole_file_system_is_no_text(settings, tmp_path):
    (tmp_path / "link").symlink_to("/")
    for path in (Path("/"), tmp_path / "link"):
        with pytest.raises(
            DataError, match="is the root of the file system; name a directory of texts"
        ):
            prepare(settings(path))


def test_a_damaged_sparse_member_of_a_tar_archive(settings, tmp_path):
    info = tarfile.TarInfo("a.txt")
    info.pax_headers = {"GNU.sparse.map": "many"}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO())
    with pytest.raises(DataError, match=r"x.tar cannot be unpacked: (?!.*network)"):
        prepare(settings(tmp_path / "x.tar"))


def test_damaged_archives(settings, tmp_path):
    for path in every_form(tmp_path, {"a.txt": os.urandom(3000).hex().encode()})[1:]:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError):
            prepare(settings(path))
    encrypted = bytearray(make_zip(tmp_path / "e.zip", {"a.txt": b"abc"}).read_bytes())
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "e.zip").write_bytes(encrypted)
    with pytest.raises(DataError, match=r"cannot be unpacked: .*encrypted"):
        prepare(settings(tmp_path / "e.zip"))


def test_every_tokenizer_sees_the_same_validation_text(settings):
    pytest.importorskip("tokenizers")
    content = "".join(f"{i} größer als {i - 1}, sagt sie.\n" for i in range(200))
    decoded = []
    for name in ("char", "byte", "bpe"):
        config = settings(content, tokenizer=name, test_split=0.05, truncate=0.75)
        encoded = prepare(config)
        tokenizer = tokenizer_from_state(encoded.tokenizer)
        from mingpt_ddp.data.dataset import TextDataset

        data = TextDataset(encoded, config)
        decoded.append(
            [tokenizer.decode(part.tolist()) for part in (data.train, data.val, data.test)]
        )
        assert prepare(config) == encoded  # from the cache
    assert decoded[0] == decoded[1] == decoded[2]
    assert "".join(decoded[0]) == content[: int(len(content) * 0.75)]


def test_several_sources_share_a_vocabulary(settings, tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50)
    (tmp_path / "b.txt").write_text("bc" * 100)
    (tmp_path / "val.txt").write_text("abcabc")
    sources = [(str(tmp_path / "a.txt"), 1.0), (str(tmp_path / "b.txt"), 3.0)]
    config = settings("unused", sources=sources, val_paths={"mixed": str(tmp_path / "val.txt")})
    encoded = prepare_all(config)
    assert encoded[""].tokenizer == {"vocabulary": "abc"}
    assert encoded[""].parts == [[90, 180], [10, 20], [0, 0]]
    assert encoded["mixed"].length == 6 and encoded["mixed"].tokenizer == encoded[""].tokenizer
    (tmp_path / "val.txt").write_text("abcd")
    with pytest.raises(DataError, match=r"data.val_paths.mixed: the model does not know 'd'"):
        prepare_all(config)


def test_a_remote_archive_has_the_sha256_of_its_texts(settings, tmp_path):
    content = make_zip(tmp_path / "x.zip", FILES).read_bytes()
    fsspec.filesystem("memory").pipe_file("/texts/x.zip", content)
    sha256 = hashlib.sha256(JOINED.encode()).hexdigest()
    for path in (str(tmp_path / "x.zip"), "memory://texts/x.zip"):
        assert text_of(settings("", path=path, sha256=sha256)) == JOINED
        with pytest.raises(DataError, match=f"has SHA-256 {sha256}, not data.sha256=0"):
            prepare(settings("", path=path, sha256="0" * 64))
