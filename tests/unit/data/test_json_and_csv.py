"""JSON Lines, JSON arrays and CSV tables: single, compressed, in directories and archives."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import logging
import lzma
from dataclasses import replace

import fsspec
import pytest

from mingpt_ddp.data.dataset import RecordedText
from mingpt_ddp.data.file_kinds import HEAD_BYTES
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text import records
from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import make_directory, make_tar, make_zip, prepare, text_of

ROWS = [{"id": i, "text": f"größer {i},\nor not\n"[: -i % 2 or None]} for i in range(400)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
TEXT = "".join(row["text"].removesuffix("\n") + "\n" for row in ROWS)


def table(rows=ROWS, **options) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, **options)
    writer.writerow(["id", "text"])
    writer.writerows([row["id"], row["text"]] for row in rows)
    return file.getvalue().encode()


FORMS = {
    "a.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "a.jsonl": LINES,
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"}\n", b"}\r\n\r\n"),
    "a.csv": table(),
    "windows.csv": b"\xef\xbb\xbf" + table(delimiter=";"),
    "a.tsv": table(delimiter="\t", lineterminator="\n"),
}


@pytest.mark.parametrize("name", FORMS)
def test_records_end_with_a_line_feed(name, settings, tmp_path, caplog):
    path = tmp_path / name
    path.write_bytes(FORMS[name])
    with caplog.at_level(logging.INFO):
        assert text_of(settings(path)) == TEXT
    form = "csv" if name.endswith("sv") else "jsonl"
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert lines == [f"read with data.format={form}, 400 texts of data.column=text"]
    assert prepare(settings(path)).form == form
    assert prepare(settings(path)).sha256 == hashlib.sha256(FORMS[name]).hexdigest()
    assert prepare(settings(path, format="text")).form == "text"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_records(compress, settings, tmp_path):
    """Compression is detected by content, since a download may have no suffix."""
    content = compress(LINES)
    assert text_of(settings(content)) == TEXT
    fsspec.filesystem("memory").pipe_file("/rows", content)
    assert text_of(settings("", path="memory://rows")) == TEXT
    for damaged in (content[: len(content) // 2], content + b"x" + content):
        with pytest.raises(DataError, match=r"text.txt is damaged or cut off: "):
            prepare(settings(damaged, format="jsonl"))


def test_several_files_of_records(settings, tmp_path, caplog):
    """Each table has its own header. Files that are empty or of another format are skipped."""
    rows = {
        "0.jsonl": LINES.removesuffix(b"\n"),
        "1.json.gz": gzip.compress(json.dumps(ROWS).encode()),
        "README.md": b"# read me\n",
    }
    tables = {
        "0.csv": table(ROWS[:100]),
        "b/1.csv": b'text,id\n"to be, or not",1\n',
        "empty.csv": b"",
    }
    make_directory(tmp_path / "rows", rows)
    make_directory(tmp_path / "tables", tables)
    with caplog.at_level(logging.INFO):
        assert text_of(settings(tmp_path / "rows")) == 2 * TEXT
    assert any(
        "skipped 1 file that looks like text ('README.md')" in record.getMessage()
        for record in caplog.records
    )
    expected = TEXT[: TEXT.index("größer 100,")] + "to be, or not\n"
    assert text_of(settings(tmp_path / "tables")) == expected
    assert text_of(settings(tmp_path / "tables/**/*.csv")) == expected
    one = {"0.jsonl": rows["0.jsonl"]}
    of_zip = f"zip://*::{make_zip(tmp_path / 'x.zip', one)}"
    of_tar = f"tar://*.jsonl::{make_tar(tmp_path / 'x.tar.xz', one, 'w:xz')}"
    for path in (of_zip, of_tar):
        encoded = prepare(settings("", path=path))
        assert encoded.sha256 == hashlib.sha256(rows["0.jsonl"]).hexdigest()
    with pytest.raises(
        DataError,
        match=r"tables has no files of data.format=jsonl: skipped 2 files that look like CSV ",
    ):
        prepare(settings(tmp_path / "tables", format="jsonl"))
    (tmp_path / "tables/z.csv").write_text("id,note\n1,a\n")
    message = r'tables: z.csv has no column "text" \(data.column=text\); .*: set data.column=note'
    with pytest.raises(DataError, match=message):
        prepare(settings(tmp_path / "tables"))


CSV = {"format": "csv"}
TWO = b'{"title": "a", "text": "b", "tags": ["c"]}\n'
NESTED = b'{"messages": [{"content": "a"}], "n": 1}\n'


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (TWO, {}, r"several columns of text; its columns are title, text, tags \(arrays\): set "),
        (
            TWO,
            {"column": "txt"},
            r'no column "txt" \(.*\); .* title, text, .*: set data.column=text',
        ),
        (
            NESTED,
            {},
            r"no column of text; its columns are messages \(arrays\), n \(numb.*; read it",
        ),
        (LINES + b"{oops}\n", {}, r"text.txt line 401 is not JSON: Expecting property name"),
        (LINES + b'["a"]\n', {}, r"text.txt line 401 is not a JSON object"),
        (LINES + b'{"text": 5}\n', {}, r"line 401: the column text holds numbers, not text"),
        (LINES + b'{"text": "\xe4"}\n', {}, r"line 401 is not UTF-8 at byte 10"),
        (LINES + b'{"text": "\\ud800"}\n', {}, r"line 401: text has half of a surrogate pair"),
        (json.dumps(ROWS).encode()[:-9], {}, r"text.txt is cut off or not JSON: Unterminated"),
        (json.dumps(ROWS).encode() + b"[]", {}, r"is cut off or not JSON: Extra data"),
        (b'[{"text": "a"} {}]', {}, r"is cut off or not JSON: Expecting ','"),
        (b"to be\n", {}, r"line 1 is not JSON: Expecting value"),
        (b"\n", {}, r"has no column of text"),
        (b'{"text": ""}\n', {}, r"is empty"),
        (
            b"id,text\n1,a\n2,b,c\n",
            CSV,
            r"line 3 has 3 fields, but the header has 2; to read it as",
        ),
        (b"id,text\n1\n", CSV, r"line 2 has 1 field, but the header has 2"),
        (b'id,text\n1,"a\n', CSV, r"line 2 is not CSV: unexpected end of data"),
        (b"1,2\n3,4\n", CSV, r"no header with a name for each column"),
        (TEXT.encode(), {"column": "text", "format": "auto"}, r"needs a table, but \S+ is read"),
    ],
)
def test_an_invalid_table_gives_one_line(content, changes, message, settings):
    config = settings(content, **{"format": "jsonl", **changes})
    with pytest.raises(DataError, match=rf"^data error: (data.column=text )?.*{message}"):
        prepare(config)


def test_rows_without_a_text_are_skipped_and_counted(settings, caplog):
    content = b'{"text": null}\n{"text": ""}\n\n' + LINES + b'{"id": 5, "title": "\\ud800"}\n'
    with caplog.at_level(logging.INFO):
        assert text_of(settings(content)) == TEXT
    expected = "400 texts of data.column=text; skipped 3 rows without text"
    assert caplog.records[-1].getMessage().endswith(expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "To be, or not to be,\nthat is the question\n", "no header with a name for each"),
        ("a.csv", "id,text\n1,\xff\n", "is not UTF-8 after line 0; convert it: iconv"),
        ("a.json", json.dumps(ROWS[0], indent=2), "neither lines of JSON objects nor an array"),
        ("a.json", "[[1, 2], [3]]", "neither lines of JSON objects nor an array"),
        ("a.json", "5", "neither lines of JSON objects nor an array"),
    ],
)
def test_a_file_named_as_a_table_must_be_one(name, content, message, settings, tmp_path):
    """data.format=text reads it unchanged. With another name, the same content is text."""
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=rf"{name}.* {message}"):
        prepare(settings(tmp_path / name))
    if content.isascii() and len(content) > 1:
        assert text_of(settings(tmp_path / name, format="text")) == content
        assert name == "a.json" or text_of(settings(content)) == content


@pytest.mark.parametrize(
    "separator", ["\u2028", "\x85", "\v", "\f", "\x1c", "\r", "\n", 70_000 * "a "]
)
@pytest.mark.parametrize(
    "form", [{}, {"delimiter": "\t", "quoting": csv.QUOTE_ALL}], ids=["csv", "tsv"]
)
def test_a_cell_may_have_any_characters(separator, form, settings, tmp_path, caplog):
    """A .csv or .tsv file is a table because of its name, in either case. The log says so."""
    text = f"to be{separator}or not"
    path = tmp_path / ("A.TSV" if form else "a.csv")
    path.write_bytes(table([{"id": 1, "text": text}, {"id": 2, "text": "that"}], **form))
    with caplog.at_level(logging.INFO):
        assert text_of(settings(path)) == f"{text}\nthat\n"
    assert caplog.messages == [
        f"data.path={path}: read with data.format=csv, 2 texts of data.column=text"
    ]


def test_a_long_row(settings, tmp_path, monkeypatch):
    """A line or an array may be as long as a limit. The error names the limit."""
    long = {"text": "to be, " * (HEAD_BYTES // 4)}
    for content, limit, advice in (
        (json.dumps(long), "MAX_RECORD", "line 1 has over 262,144 bytes; split it"),
        (json.dumps([long]), "MAX_ARRAY", "a JSON array of over 262,144 bytes; write it as JSON L"),
    ):
        assert long["text"] in text_of(settings(content))
        monkeypatch.setattr(records, limit, HEAD_BYTES)
        with pytest.raises(DataError, match=advice):
            prepare(settings(content, cache_dir=str(tmp_path / "new")))


def test_all_texts_of_a_run_must_have_the_same_format(settings, tmp_path):
    (tmp_path / "val.txt").write_text(TEXT)
    rows = settings(LINES, val_paths={"other": str(tmp_path / "val.txt")})
    split = replace(rows, val_paths=None, split_paths={"val": str(tmp_path / "val.txt")})
    for config in (rows, split):
        with pytest.raises(DataError, match=r"val.txt looks like data.format=text, .* like jsonl"):
            prepare_all(config)
    (tmp_path / "val.txt").write_bytes(LINES)
    encoded = prepare_all(rows)
    assert encoded["other"].length == encoded[""].length == len(TEXT)
    again = prepare_all(rows, recorded=RecordedText(encoded[""].sha256, "jsonl"))
    assert again == encoded


def test_a_reader_has_no_format(settings):
    with pytest.raises(ConfigError, match=r"data.reader=mine decides itself how to read; leave"):
        settings("", reader="mine", format="jsonl")
    assert settings("", reader="mine", column="text").column == "text"  # a key of the reader itself
    with pytest.raises(ConfigError, match=r"data.column=text needs a table"):
        settings("", format="text", column="text")


def test_a_file_without_the_column(settings, tmp_path):
    for name, content in (("a", LINES), ("b", b'{"content": "to be"}\n' * 2)):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    path = f"{tmp_path}/?.jsonl"
    message = r': b.jsonl has no column "text" \(data.column=text\) in any line; name'
    with pytest.raises(DataError, match=message):
        prepare(settings("", path=path, column="text"))
