"""Files in binary formats are detected and refused by name. Prose and code never are."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import logging
import lzma
import os
import random
import re
import shutil
import subprocess
import sysconfig
import zlib
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from safetensors.numpy import save

from mingpt_ddp.data.dataset import RecordedText
from mingpt_ddp.data.file_kinds import HEAD_BYTES, TEXT, kind_of
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.errors import DataError
from tests.unit.data.reading import make_directory, make_tar, make_zip, prepare

PROSE = "Zwölf Boxkämpfer jagen Viktor, \U0001f600 quer über den Sylter Deich.\n" * 200
ROWS = [{"id": i, "text": f"to be {i}\nor not"} for i in range(300)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PARQUET = b"PAR1\x15\x04\x15\x90\x0c\x15" + zlib.compress(JSONL) + b"\0\0PAR1"
# The stream begins with 0x98 bytes of metadata, as pyarrow and `datasets` write it.
ARROW_STREAM = b"\xff\xff\xff\xff\x98\0\0\0\x10\0\0\0\0\0\n\0" + JSONL
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(500)
CHARS = sorted(set(PROSE))
TOKENS = [CHARS.index(character) for character in PROSE]
BPE_IDS = random.Random(1).choices([262, 11, 13, 198, 50256, 30000, 318, 0], k=9000)


def written(write) -> bytes:
    """Return the bytes that a function writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


BINARY = "binary data with NUL bytes, such as tokens"
FLOODED = "binary data with many control characters"
NOT_UTF8 = "binary data or text that is not UTF-8"
NO_TEXT = {
    "train.bin of nanoGPT, characters": (np.uint16(TOKENS).tobytes(), BINARY),
    "train.bin of nanoGPT, BPE": (np.uint16(BPE_IDS).tobytes(), BINARY),
    "floats": (np.linspace(0, 1, 999, dtype="f4").tobytes(), BINARY),
    "a NUL": (PROSE.encode() + b"\0", BINARY),
    "safetensors": (save({"w": np.ones(99)}), BINARY),
    "PNG": (PNG, BINARY),
    "xz": (lzma.compress(JSONL), BINARY),
    "tokens of a byte": (bytes(1 + token % 60 for token in TOKENS), FLOODED),
    "UTF-16 with a mark": (codecs.BOM_UTF16_LE + PROSE.encode("utf-16-le"), "UTF-16LE"),
    "UTF-16 with the other": (codecs.BOM_UTF16_BE + PROSE.encode("utf-16-be"), "UTF-16BE"),
    "UTF-16 LE": (PROSE.encode("utf-16-le"), "UTF-16LE"),
    "UTF-16 BE": (PROSE.encode("utf-16-be"), "UTF-16BE"),
    "UTF-16 Chinese": ("春眠不覚暁 処処聞啼鳥\n".encode("utf-16-le") * 99, "UTF-16LE"),
    "UTF-32 with a mark": (codecs.BOM_UTF32_LE + PROSE.encode("utf-32-le"), "UTF-32LE"),
    "UTF-32 with the other": (codecs.BOM_UTF32_BE + PROSE.encode("utf-32-be"), "UTF-32BE"),
    "UTF-32 LE": (PROSE.encode("utf-32-le"), "UTF-32LE"),
    "UTF-32 BE": (PROSE.encode("utf-32-be"), "UTF-32BE"),
    "latin": (PROSE.replace("\U0001f600", "").encode("latin-1"), NOT_UTF8),
    "PDF": (b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj << /Type /Catalog >>\n", NOT_UTF8),
    "JSON Lines": (JSONL, "JSON Lines"),
    "JSON Lines of Windows": (b"\xef\xbb\xbf" + JSONL.replace(b"\n", b"\r\n"), "JSON Lines"),
    "JSON Lines that are cut off": (JSONL[:300], "JSON Lines"),
    "JSON Lines, longer than what is looked at": (JSONL * 99, "JSON Lines"),
    "JSON Lines of long lines": (json.dumps({"text": PROSE * 50}).encode(), "JSON Lines"),
    "an array": (json.dumps(ROWS).encode(), "a JSON array of objects"),
    "an indented array": (json.dumps(ROWS, indent=2).encode(), "a JSON array of objects"),
    "a long object": (json.dumps([{"text": PROSE * 50}]).encode(), "a JSON array of objects"),
    "Parquet": (PARQUET, "Parquet"),
    "Arrow": (b"ARROW1\0\0" + ARROW_STREAM, "Arrow"),
    "Feather 1": (b"FEA1\x10\0\0\0", "Arrow"),
    "an Arrow stream": (ARROW_STREAM, "Arrow"),
    "npy": (written(lambda file: np.save(file, np.arange(99))), "NumPy"),
    "npz": (written(lambda file: np.savez(file, a=np.arange(99))), "a zip archive"),
}

TEXTS = {
    "prose": PROSE,
    "a character that the end of the head divides": "x" + "é" * HEAD_BYTES,
    "prose of Windows": "\ufeff" + PROSE.replace("\n", "\r\n"),
    "nothing": "",
    "a CSV": "id,text\n" + '1,"to be, or not"\n' * 99,
    "a TSV": "id\ttext\n" + "1\tto be\n" * 99,
    "a table": "| a | b |\n| --- | --- |\n" + "| 1, 2 | x |\n" * 99,
    "an object that is not whole": '{"a": 1, b}',
    "one JSON object on several lines": json.dumps(ROWS[0], indent=2),
    "a JSON array of numbers": json.dumps([[1, 2]] * 99),
    "a log of JSON that ends in a traceback": '{"level": "info"}\n' * 99 + "Traceback:\n",
    "a template": '{"name"} of the {"place"}\n' * 99,
    "sets": '{"a"}\n' * 99,
    "code that begins with a brace": "{\n  int x = 1;\n}\n" * 99,
    "a list of sets": "[{1, 2}, {3}]\n" * 99,
    "brackets too deep for a parser": '{"a":' * 10_000,
    "brackets in an array": '[{"a":' * 100,
    "prose that begins as an array": '[{"a": 1}] is how a list of objects begins.\n' * 9,
    "code that begins with an array": "[{}].map(f)\n" * 99,
    "long prose that begins as an array": '[{"stage": 1 means}] ' + "to be\n" * 60_000,
    "long prose that begins as an object": '{"abc": is a word} ' + "to be " * 60_000,
    "objects and prose": "{}\n{}\n{ hello world this is prose\n",
    "colours of a chat": "<\x0304nick\x03> \x02hello\x0f \x1fworld\x1f\n" * 99,
    "separators of records": "a\x1fb\x1e" * 99,
    "prose on PDF": "%PDF-1.4 is how such a file begins.\n" * 9,
    "colours of a terminal": "\x1b[32mINFO\x1b[0m step 1\r\n" * 99,
    "backspaces of a manual": "N\bNA\bAM\bME\bE\n" * 99,
    "form feeds": "\x0c\nchapter\n" * 99,
    "the end of a file of DOS": "yes\r\n\x1a",
    "some control characters": (PROSE + "\x01") * 9,
    "the name of a magic number": "PAR1 and ARROW1, BM and GIF89a are magic numbers.\n",
    "a safetensors header as prose": '12345678{"a": 1}\n',
    "the language reference": "\n\n".join(topics.values()),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_the_format_of_a_file_that_is_not_text_is_named(name):
    content, expected = NO_TEXT[name]
    kind = kind_of(content[:HEAD_BYTES])
    assert kind.name == expected
    assert kind.advice


@pytest.mark.parametrize("name", TEXTS)
def test_prose_and_code_are_recognized_as_text(name):
    assert kind_of(TEXTS[name].encode()[:HEAD_BYTES]) == TEXT


def test_the_source_of_python_is_text():
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    refused = [path for path in paths if kind_of(path.read_bytes()[:HEAD_BYTES]) != TEXT]
    assert refused == []


WIDE = [name for name in NO_TEXT if name.startswith(("UTF-16 with", "UTF-32 with"))]


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize("name", WIDE)
def test_the_advised_iconv_command_gives_the_same_text(name, settings, tmp_path):
    """iconv keeps the byte order mark. It is not part of the text, also not in a directory."""
    content, _ = NO_TEXT[name]
    _, _, command = kind_of(content).advice.partition("convert it: ")
    (tmp_path / "OLD").write_bytes(content)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    converted = (tmp_path / "NEW").read_bytes()
    assert converted == codecs.BOM_UTF8 + PROSE.encode()
    expected = prepare(settings(PROSE)).tokens_sha256
    assert prepare(settings(converted)).tokens_sha256 == expected
    directory = make_directory(tmp_path / "texts", {"a.txt": converted})
    assert prepare(settings(directory)).tokens_sha256 == expected


# A single file


def test_a_new_run_refuses_a_file_that_is_not_text(settings, tmp_path):
    """It does so whether the file is in the cache or not."""
    content = "".join(sorted({*PROSE})) + "\x01" * 30
    as_text = settings(content, format="text")
    assert prepare(as_text).length == len(content)
    for config in (as_text, settings(content, cache_dir=str(tmp_path / "empty"))):
        with pytest.raises(
            DataError,
            match=r"text.txt looks like binary data with many control characters, not text; "
            r"read it with a reader of your own \(docs/your-own-model.md\), or as text with "
            r"data.format=",
        ):
            prepare_all(replace(config, format="auto"))
    assert not (tmp_path / "empty").exists()
    with pytest.raises(DataError, match="looks like binary data with many control characters"):
        prepare(settings(gzip.compress(content.encode())))


def test_text_is_still_utf8(settings):
    for content, message in (
        (lzma.compress(b"to be"), None),
        (lzma.compress(PNG), "is not UTF-8 at byte 0; convert it: iconv"),
        (PROSE.encode("utf-16-le"), "convert it: iconv -f UTF-16LE -t UTF-8"),
        (b"\xff\0ab", "is not UTF-8 at byte 0; convert it: iconv"),
        (b"ab\0ab", None),
    ):
        config = settings(content, format="text")
        if message is None:
            assert prepare(config).length == 5
        else:
            with pytest.raises(DataError, match=message):
                prepare(config)


# Several files


def test_mostly_data_is_refused(settings, tmp_path):
    """The README in a directory of images is not the text to train on."""
    files = {f"{i:05}.png": PNG * 9 for i in range(4)}
    path = make_directory(tmp_path / "a", {"README.md": PROSE[:99].encode(), **files})
    with pytest.raises(
        DataError,
        match=r"a is mostly not text: skipped 4 files that look like binary data .* "
        r"\('00000.png', .*, \.\.\.\), "
        r"[\d,]+ of [\d,]+ bytes; name only its texts, by a glob, or convert it: iconv",
    ):
        prepare(settings(path))
    as_text = prepare(settings(path, format="text", tokenizer="byte"))
    assert as_text.length == 100 + len(PROSE[:99].encode()) - 99


@pytest.mark.parametrize(("make", "chain"), [(make_zip, "zip"), (make_tar, "tar")])
def test_an_archive_is_refused_with_the_words_that_read_it(make, chain, settings, tmp_path):
    path = make(tmp_path / "a.docx", {"a/b.txt": PROSE.encode()})
    message = re.escape(f"name the files in it: 'data.path=\"{chain}://**::{path}\"'")
    for form in ("auto", "text"):
        with pytest.raises(DataError, match=message):
            prepare(settings(path, format=form))


def test_compressed_files_are_compared_by_their_own_size(settings, tmp_path):
    """A text that expands a lot does not outweigh larger data files beside it."""
    text, data = gzip.compress(PROSE.encode()), gzip.compress(random.randbytes(5000))
    assert len(PROSE.encode()) > len(data) > len(text)
    path = make_directory(tmp_path / "texts", {"a.txt.gz": text, "data.gz": data})
    sizes = f"{len(data):,} of {len(data) + len(text):,} bytes"
    with pytest.raises(DataError, match=rf"mostly not text: skipped 1 .*, {sizes}; "):
        prepare(settings(path))


def test_file_names_cannot_forge_log_lines(settings, tmp_path, caplog):
    files = {"a.b\nc": b"to be\n", "\n2.x\n": PNG[:9], "x" * 199: b"b"}
    path = make_zip(tmp_path / "x.zip", files)
    config = settings(path, path=f"zip://**::{path}")
    with caplog.at_level(logging.INFO):
        with pytest.raises(DataError, match="mostly not text") as caught:
            prepare(config)
        prepare(replace(config, format="text"))
    lines = caplog.messages
    assert len(lines) == 2
    assert all("\n" not in line and len(line) < 900 for line in [*lines, str(caught.value)])


# A run that has a snapshot


def test_a_run_continues_with_the_texts_that_it_started_with(settings, tmp_path):
    """It reads each of its texts as it did at first, even if a new run would now refuse them."""
    files = {"a.txt": PROSE.encode(), "docs.jsonl": JSONL[:300]}
    path = make_directory(tmp_path / "texts", files)
    auto = settings(path, tokenizer="byte", val_paths={"other": str(path)})
    before = {config.format: prepare_all(config) for config in (auto, replace(auto, format="text"))}
    assert before["auto"][""].sha256 != before["text"][""].sha256
    make_directory(path, {"new.png": PNG * 999, ".hidden": b"x"})  # now it would be refused
    with pytest.raises(DataError, match="is mostly not text"):
        prepare_all(auto)
    for form, texts in before.items():
        recorded = RecordedText(texts[""].sha256)
        again = prepare_all(replace(auto, format=form), recorded=recorded)
        for name, text in texts.items():
            same = {"directory": text.directory, "notes": text.notes}
            assert replace(again[name], **same) == text
    data = settings(JSONL, tokenizer="byte")
    known = prepare(replace(data, format="text"))
    again = prepare_all(data, recorded=RecordedText(known.sha256))[""]
    assert replace(again, directory=known.directory) == known
    decided = prepare_all(data)[""]
    assert decided.form == "jsonl" and decided != known
    for recorded in (RecordedText(decided.sha256, "jsonl"), RecordedText("0" * 64)):
        assert prepare_all(data, recorded=recorded)[""] == decided


def test_a_text_with_holes_is_not_read_to_its_end(settings, tmp_path):
    """The sparse file has a terabyte, but takes no space on the disk."""
    path = tmp_path / "text.txt"
    path.write_bytes(PROSE.encode())
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"text\.txt has holes, as an unfinished download does"):
        prepare_all(settings(path), recorded=RecordedText("0" * 64))
