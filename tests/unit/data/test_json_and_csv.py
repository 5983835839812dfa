"""JSON Lines, JSON arrays and tables in CSV, alone, compressed, in directories and archives."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import logging
import lzma
import tarfile
import zipfile
from dataclasses import replace

import fsspec
import pytest

from mingpt_ddp.data.dataset import RecordedText
from mingpt_ddp.data.file_kinds import HEAD_BYTES
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text import records
from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import prepare, text_of

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
    """By their content: a download has no suffix."""
    content = compress(LINES)
    assert text_of(settings(content)) == TEXT
    fsspec.filesystem("memory").pipe_file("/rows", content)
    assert text_of(settings("", path="memory://rows")) == TEXT
    for damaged in (content[: len(content) // 2], content + b"x" + content):
        with pytest.raises(DataError, match=r"text.txt is damaged or cut off: "):
            prepare(settings(damaged, format="jsonl"))


def test_several_files_of_records(settings, tmp_path, caplog):
    """Each table with its header; other files are skipped, empty ones too."""
    for name, content in {
        "rows/0.jsonl": LINES.removesuffix(b"\n"),
        "rows/1.json.gz": gzip.compress(json.dumps(ROWS).encode()),
        "rows/README.md": b"# read me\n",
        "tables/0.csv": table(ROWS[:100]),
        "tables/b/1.csv": b'text,id\n"to be, or not",1\n',
        "tables/empty.csv": b"",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.INFO):
        assert text_of(settings(tmp_path / "rows")) == 2 * TEXT
    assert any("skipped 1 text ('README.md')" in record.getMessage() for record in caplog.records)
    expected = TEXT[: TEXT.index("größer 100,")] + "to be, or not\n"
    assert text_of(settings(tmp_path / "tables")) == expected
    assert text_of(settings(tmp_path / "tables/**/*.csv")) == expected
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(tmp_path / "rows/0.jsonl", "0.jsonl")
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "rows/0.jsonl", "0.jsonl")
    for path in ("zip://*::x.zip", "tar://*.jsonl::x.tar.xz"):
        *chain, name = path.rpartition("::")
        encoded = prepare(settings("", path="".join([*chain, str(tmp_path / name)])))
        assert (
            encoded.sha256 == hashlib.sha256((tmp_path / "rows/0.jsonl").read_bytes()).hexdigest()
        )
    with pytest.raises(
        DataError, match=r"tables has no files of data.format=jsonl: skipped 2 CSV "
    ):
        prepare(settings(tmp_path / "tables", format="jsonl"))
    (tmp_path / "tables/z.csv").write_text("id,note\n1,a\n")
    with pytest.raises(
        DataError,
        match=r'tables: z.csv has no column "text" \(data.column=text\); .*: set data.column=note',
    ):
        prepare(settings(tmp_path / "tables"))


TWO = b'{"title": "a", "text": "b", "tags": ["c"]}\n'
NESTED = b'{"messages": [{"content": "a"}], "n": 1}\n'


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (
            TWO,
            {},
            r"several columns of text; its columns are title, text, tags \(arrays\): set data.c",
        ),
        (
            TWO,
            {"column": "txt"},
            r'has no column "txt" \(data.column=txt\); .* title, text, .*: set data.column=text',
        ),
        (
            NESTED,
            {},
            r"has no column of text; its columns are messages \(arrays\), n \(numb.*; read it with",
        ),
        (LINES + b"{oops}\n", {}, r"text.txt line 401 is not JSON: Expecting property name"),
        (LINES + b'["a"]\n', {}, r"text.txt line 401 is not a JSON object"),
        (LINES + b'{"text": 5}\n', {}, r"line 401: text is one of numbers, not a string"),
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
            {"format": "csv"},
            r"line 3 has 3 fields, and the header has 2; to read it as it is, set data.format=text",
        ),
        (b'id,text\n1,"a\n', {"format": "csv"}, r"line 2 is not CSV: unexpected end of data"),
        (b"1,2\n3,4\n", {"format": "csv"}, r"no header with a name for each column"),
        (TEXT.encode(), {"column": "text", "format": "auto"}, r"needs a table; \S+ is read as t"),
    ],
)
def test_what_is_wrong_is_one_line(content, changes, message, settings):
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
    ("content", "message"),
    [
        ("To be, or not to be,\nthat is the question: whether\n", "no header with a name for each"),
        ("1,2\n3,4\n", "no header with a name for each"),
        ("id,text\n1\n", "line 2 has 1 field, and the header has 2"),
        ("id,text\n1,\xff\n", "is not UTF-8 after line 0; convert it: iconv"),
    ],
)
def test_a_file_called_a_table_is_one_or_is_refused(content, message, settings, tmp_path):
    """data.format=text reads it as it is; a file with another name is a text."""
    (tmp_path / "a.csv").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=rf"a.csv.* {message}"):
        prepare(settings(tmp_path / "a.csv"))
    if content.isascii():
        assert text_of(settings(tmp_path / "a.csv", format="text")) == content
        assert text_of(settings(content)) == content


@pytest.mark.parametrize(
    "separator", ["\u2028", "\x85", "\v", "\f", "\x1c", "\r", "\n", 70_000 * "a "]
)
@pytest.mark.parametrize(
    "form", [{}, {"delimiter": "\t", "quoting": csv.QUOTE_ALL}], ids=["csv", "tsv"]
)
def test_a_cell_may_have_any_characters(separator, form, settings, tmp_path, caplog):
    """A .csv or .tsv is a table by its name, also in upper case, and the log says so."""
    text = f"to be{separator}or not"
    path = tmp_path / ("A.TSV" if form else "a.csv")
    path.write_bytes(table([{"id": 1, "text": text}, {"id": 2, "text": "that"}], **form))
    with caplog.at_level(logging.INFO):
        assert text_of(settings(path)) == f"{text}\nthat\n"
    assert caplog.messages == [
        f"data.path={path}: read with data.format=csv, 2 texts of data.column=text"
    ]


def test_a_long_row(settings, tmp_path, monkeypatch):
    """Lines and arrays are read while they are shorter than a limit, which is named."""
    long = {"text": "to be, " * HEAD_BYTES}
    for content, limit, advice in (
        (json.dumps(long), "MAX_RECORD", "line 1 has over 262,144 bytes; split it"),
        (json.dumps([long]), "MAX_ARRAY", "a JSON array of over 262,144 bytes; write it as JSON L"),
    ):
        assert long["text"] in text_of(settings(content))
        monkeypatch.setattr(records, limit, HEAD_BYTES)
        with pytest.raises(DataError, match=advice):
            prepare(settings(content, cache_dir=str(tmp_path / "new")))


@pytest.mark.parametrize("content", [json.dumps(ROWS[0], indent=2), "[[1, 2], [3]]", "5"])
def test_a_file_called_json_is_never_trained_on_as_text(content, settings, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a.json is neither lines of JSON objects nor an array of"):
        prepare(settings(tmp_path / "a.json"))
    if len(content) > 1:
        assert text_of(settings(tmp_path / "a.json", format="text")) == content


def test_texts_have_one_format(settings, tmp_path):
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
    with pytest.raises(ConfigError, match=r"data.reader=mine reads its text itself; leave out dat"):
        settings("", reader="mine", format="jsonl")
    assert settings("", reader="mine", column="text").column == "text"  # a key of its own
    with pytest.raises(ConfigError, match=r"data.column=text needs a table"):
        settings("", format="text", column="text")


def test_a_file_without_the_column(settings, tmp_path):
    for name, content in (("a", LINES), ("b", b'{"content": "to be"}\n' * 2)):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    path = f"{tmp_path}/?.jsonl"
    with pytest.raises(
        DataError, match=r': b.jsonl has no column "text" \(data.column=text\) in any line; name'
    ):
        prepare(settings("", path=path, column="text"))
