"""Parquet files and zstd compression, which need pyarrow."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys

import pytest

from mingpt_ddp.errors import ConfigError, DataError
from tests.unit.data.reading import make_zip, prepare, text_of

pytestmark = pytest.mark.integration
pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
TEXTS = [f"größer {i},\nor not" for i in range(3000)]
TEXT = "".join(f"{text}\n" for text in TEXTS)
IDS = pa.array(range(3000))
NOTES = pa.array([[{"role": "user"}]] * 3000)


def table(texts=None):
    return pa.table({"id": IDS, "text": texts or pa.array(TEXTS), "notes": NOTES})


def write(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(rows, path, row_group_size=700)


def test_the_only_string_column_is_the_text(settings, tmp_path):
    """The file is recognized by its content. The column may have any of Arrow's string types."""
    path = tmp_path / "rows"
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for kind in kinds:
        write(path, table(pa.array(TEXTS).cast(kind)))
        assert text_of(settings(path)) == TEXT
    encoded = prepare(settings(path))
    assert encoded.form == "parquet"
    assert encoded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_shards_and_archives(settings, tmp_path, caplog):
    rows = table()
    for i in range(3):
        write(tmp_path / f"rows/{i}.parquet", rows.slice(1000 * i, 1000))
    (tmp_path / "rows/README.md").write_text("three shards\n")
    make_zip(tmp_path / "x.zip", {p.name: p.read_bytes() for p in (tmp_path / "rows").iterdir()})
    for path in (f"{tmp_path}/rows", f"{tmp_path}/rows/*.parquet", f"zip://**::{tmp_path}/x.zip"):
        assert text_of(settings("", path=path)) == TEXT


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "rows", "saved"])
def test_arrow_is_refused_with_the_words_that_make_parquet(name, settings, tmp_path):
    """A folder that `save_to_disk` of `datasets` wrote is refused too."""
    path = tmp_path / name / "data-0.arrow" if name == "saved" else tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table())
    with pytest.raises(
        DataError, match=r"write it as Parquet: dataset.to_parquet\('data.parquet'\)"
    ):
        prepare(settings(tmp_path / name))


def test_an_invalid_file_or_column_gives_one_line(settings, tmp_path):
    path = tmp_path / "rows"
    write(path, table())
    path.write_bytes(path.read_bytes()[:-100])
    message = "is not Parquet, or it is damaged or cut off: Parquet magic bytes not found"
    with pytest.raises(DataError, match=f"^data error: data.path={path} {message}"):
        prepare(settings(path))
    write(path, pa.table({"notes": NOTES}))
    with pytest.raises(DataError, match=r"no column of text; its columns are notes \(list<"):
        prepare(settings(path))
    write(path, pa.table({"a": TEXTS, "b": TEXTS}))
    with pytest.raises(
        DataError, match=r"several columns of text; its columns are a, b: set data.column=a"
    ):
        prepare(settings(path))
    assert text_of(settings(path, column="b")) == TEXT
    invalid = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    write(path, pa.table({"a": invalid}))
    with pytest.raises(DataError, match=r"damaged or cut off after row 0: .* UTF"):
        prepare(settings(path))
    with pytest.raises(DataError, match=r"is not Parquet"):
        prepare(settings("to be", format="parquet"))


def test_nulls_are_skipped_and_counted(settings, tmp_path, caplog):
    write(tmp_path / "rows", pa.table({"text": ["a", None, "", "b\n"]}))
    with caplog.at_level(logging.INFO):
        assert text_of(settings(tmp_path / "rows")) == "a\nb\n"
    assert "2 texts of data.column=text; skipped 2 rows without text" in caplog.text


def test_zstd(settings, tmp_path):
    """The file may have several frames. A file that is cut off is refused."""
    compressed = 2 * pa.compress(TEXT.encode(), "zstd", asbytes=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    assert text_of(settings(compressed)) == TEXT * 2
    content = pa.compress(lines, "zstd", asbytes=True)
    assert text_of(settings(content)) == TEXT
    for cut in (compressed, content):
        with pytest.raises(DataError, match=r"damaged or cut off"):
            prepare(settings(cut[:-100]))


def test_without_pyarrow_one_line_names_the_package_to_install(settings, tmp_path, monkeypatch):
    write(tmp_path / "rows", table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"data.format=parquet needs pyarrow; pip install 'mingpt_ddp\[da"
    ):
        prepare(settings(tmp_path / "rows"))


PEAK = """
import sys
import pyarrow
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.prepare import prepare_all

for path in sys.argv[2:]:
    names = {"cache_dir": sys.argv[1], "column": "text", "tokenizer": "byte", "format": "parquet"}
    encoded = prepare_all(DataConfig(name="a", path=path, **names))
    print(encoded[""].length, pyarrow.default_memory_pool().max_memory() >> 20)
"""


def test_memory_does_not_grow_with_the_size_of_rows(tmp_path):
    """One file has 120 MiB in rows of 1 MiB. The other repeats the same 2 MiB up to 240 MiB."""
    other = [300 * "a" + str(i) * (1 << 19) for i in range(10, 130)]
    repeated = ["ab" * (1 << 20)] * 120
    names = {"small": other[:2], "other": other, "repeated": repeated}
    for name, rows in names.items():
        pa.parquet.write_table(pa.table({"text": rows}), tmp_path / name, write_batch_size=8)
    words = [str(tmp_path / name) for name in ("cache", *names)]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, check=True)
    sizes, peaks = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert [*sizes] == [sum(map(len, rows)) + len(rows) for rows in names.values()]
    assert peaks[-1] < peaks[0] + 100, "MiB"
