"""Texts from directories, from globs, and from archives by fsspec's URLs."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import re
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from mingpt_ddp.errors import DataError
from tests.unit.data.reading import make_directory, make_tar, make_zip, prepare, text_of

FILES = {"b/2.txt": b"second\n", "a.txt": b"first", "b/10.md": "dritter: ß".encode()}
JOINED = "first\ndritter: ß\nsecond\n"  # sorted by file name, with a line feed after each text


def every_form(root: Path, files=FILES) -> list[str]:
    """Write the files as a directory and as archives. Return the path or URL of each."""
    return [
        str(make_directory(root / "texts", files)),
        f"zip://**::{make_zip(root / 'x.zip', files)}",
        f"tar://**::{make_tar(root / 'x.tar', files)}",
        f"tar://**::{make_tar(root / 'x.tar.gz', files, 'w:gz')}",
        f"tar://**::{make_tar(root / 'x.tgz', files, 'w:gz')}",
    ]


def test_texts_are_joined_in_the_order_of_their_names(settings, tmp_path):
    forms = every_form(tmp_path)
    make_zip(tmp_path / "lzma.zip", FILES, zipfile.ZIP_LZMA)
    sha256 = hashlib.sha256(JOINED.encode()).hexdigest()
    for path in [*forms, f"zip://**::{tmp_path}/lzma.zip"]:
        config = settings("", path=path, sha256=sha256)
        assert text_of(config) == JOINED
        with pytest.raises(DataError, match=f"has SHA-256 {sha256}, not data.sha256=0"):
            prepare(replace(config, sha256="0" * 64))
    assert text_of(settings("", path=f"{forms[0]}/**/*.txt")) == "first\nsecond\n"
    assert text_of(settings("", path=f"zip://**/*.txt::{tmp_path}/x.zip")) == "first\nsecond\n"
    assert text_of(settings("", path=f"zip://b/2.txt::{tmp_path}/x.zip")) == "second\n"
    make_zip(tmp_path / "x.zip", {**FILES, "b/2.txt": b"another\n"})
    assert text_of(settings("", path=f"zip://b/*.txt::{tmp_path}/x.zip")) == "another\n"
    (tmp_path / "texts/b/2.txt").write_bytes(gzip.compress(b"\xef\xbb\xbfsecond"))
    assert text_of(settings(tmp_path / "texts")) == JOINED


def test_the_files_of_an_archive_at_a_url(settings, tmp_path):
    content = make_zip(tmp_path / "x.zip", FILES).read_bytes()
    fsspec.filesystem("memory").pipe_file("/texts/x.zip", content)
    assert text_of(settings("", path="zip://**::memory://texts/x.zip")) == JOINED
    for name, text in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/many/{name}", text)
    assert text_of(settings("", path="memory://many/**")) == JOINED
    with pytest.raises(DataError, match=r"memory://none/\*.txt has no texts"):
        prepare(settings("", path="memory://none/*.txt"))


def test_hidden_and_binary_files_are_skipped_with_a_line(settings, tmp_path, caplog):
    files = {
        **FILES,
        ".git/config": b"hidden",
        "image.png": b"\x89PNG\r\n\x1a\n",
        "latin.txt": b"\xe4bc",
        "nul.bin": b"\1\0",
        "wide.txt": b"\xff\xfea\0\n\0",
    }
    for path in every_form(tmp_path, files):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert text_of(settings("", path=path)) == JOINED
        ours = [each for each in caplog.records if each.name.startswith("mingpt_ddp")]
        skipped, read = [each.getMessage() for each in ours]
        assert re.fullmatch(
            rf"data.path={re.escape(path)}: read with data.format=text, 3 files of 23 bytes "
            r"\('.*a.txt', 'b/.*10.md', 'b/.*2.txt'\)",
            read,
        )
        assert re.fullmatch(
            rf"data.path={re.escape(path)}: skipped 2 files that look like binary data "
            r"or text that is not UTF-8 \('.*image.png', '.*latin.txt'\), 1 file that looks like "
            r"binary data with NUL bytes, such as tokens \('.*nul.bin'\), 1 file that looks like "
            r"UTF-16LE \('.*wide.txt'\)",
            skipped,
        )
    for name in files.keys() & FILES.keys():
        (tmp_path / "texts" / name).unlink()
    with pytest.raises(
        DataError, match=r"texts has no texts: skipped 2 files .* not UTF-8 .*; convert it: iconv"
    ):
        prepare(settings(tmp_path / "texts"))


def test_member_names_are_never_used_as_paths(settings, tmp_path):
    """Whatever a member of an archive is called, nothing is written outside the cache."""
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    path = make_tar(tmp_path / "x.tar", {"../../escape.txt": b"abc\n"})
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, str(outside)
            archive.addfile(info)
    assert text_of(settings("", path=f"tar://**::{path}")) == "abc\n"
    path = make_zip(tmp_path / "x.zip", {"../escape.txt": b"abc\n"})
    assert text_of(settings("", path=f"zip://**::{path}")) == "abc\n"
    assert not [*tmp_path.parent.glob("escape*")]
    expected = {"outside.txt", "text.txt", "x.tar", "x.zip", "cache"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_the_root_of_the_file_system_is_refused(settings, tmp_path):
    (tmp_path / "link").symlink_to("/")
    for path in (Path("/"), tmp_path / "link"):
        with pytest.raises(DataError, match="is the root of the file system; name a directory"):
            prepare(settings(path))


def test_damaged_archives(settings, tmp_path):
    for path in every_form(tmp_path, {"a.txt": os.urandom(3000).hex().encode()})[1:]:
        archive = Path(path.rpartition("::")[2])
        archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
        with pytest.raises(DataError, match=r"cannot read data.path="):
            prepare(settings("", path=path))
