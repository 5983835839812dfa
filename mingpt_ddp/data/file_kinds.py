"""Recognize the format of a file by its name and its first bytes.

Prose and code must never be refused: lines of JSON only count if all of them are objects.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mingpt_ddp.config.keys.components import Form
from mingpt_ddp.errors import ConfigError, DataError

HEAD_BYTES = 1 << 18  # bytes of a text that are looked at
ENCODED_BYTES = 1 << 13  # bytes of the head that are looked at to recognize UTF-16
FLOOD = 0.1  # share of control characters that no text has
MIN_FLOOD = 16  # control characters
# Control characters that no text has. Terminals write backspace, tab, form feed and escape, chats
# the codes of colours, records their separators.
CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1b", *b"\x02\x03\x0f\x16", *range(28, 32)})
READ = "read it with a reader of your own (docs/your-own-model.md)"
CONVERT = "convert it: iconv -f {} -t UTF-8 OLD >NEW"
READ_RECORDS = "read it with data.format={}"
WAYS_OUT = (
    f"{CONVERT.format('ISO-8859-1')}; or, if these are tokens, add data.format=tokens "
    f"(docs/data.md); or {READ}"
)


@dataclass(frozen=True)
class Kind:
    """The format of a file, and what to do if it cannot be read as text."""

    name: str
    advice: str
    form: Form | None = None  # the data.format that reads it

    def refusal(self, source: str, path: str, wanted: str) -> DataError:
        """Return the error that refuses a file of this format. `wanted` names the expected one."""
        advice = self.advice.replace("FILE", path)
        return DataError(f"{source} looks like {self.name}, not {wanted}; {advice}")


TEXT = Kind("text", "", "text")
CSV = Kind("CSV", READ_RECORDS.format("csv"), "csv")
JSON_LINES = Kind("JSON Lines", READ_RECORDS.format("jsonl"), "jsonl")
JSON_ARRAY = Kind("a JSON array of objects", READ_RECORDS.format("jsonl"), "jsonl")
PARQUET = Kind("Parquet", READ_RECORDS.format("parquet"), "parquet")
ARROW = Kind("Arrow", "write it as Parquet: dataset.to_parquet('data.parquet')")
NUMPY = Kind("NumPy", f"if these are tokens, add data.format=tokens (docs/data.md), else {READ}")
NOT_UTF8 = Kind("not UTF-8", WAYS_OUT)
BINARY = Kind("binary data with NUL bytes, such as tokens", WAYS_OUT)
FLOODED = Kind("text with control characters", f"{READ}, or as text with data.format=text")
ARCHIVE = "name the files in it: 'data.path=\"{}://**::FILE\"'"
ZIP = Kind("a zip archive", ARCHIVE.format("zip"))
TAR = Kind("a tar archive", ARCHIVE.format("tar"))
SUFFIXES = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
}
FORMATS = {
    PARQUET: rb"PAR1",
    ARROW: rb"ARROW1\0\0|FEA1|\xff{4}.{3}\0",
    NUMPY: rb"\x93NUMPY",
    ZIP: rb"PK\x03\x04|PK\x05\x06",
    TAR: rb".{257}ustar",
}
WIDE_ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")  # with a BOM or without
AFTER_OBJECT = re.compile(r"\s*(,\s*(\{|$)|\]?\s*$)")  # in an array of objects
LONGEST_LITERAL = 6  # characters: \u0000
ARRAY = re.compile(r"\[\s*(?=\{)")
# Splits by the names of files and directories, in lower case.
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)


def _all_streams(opened: Callable[[Any], Any], file: Any) -> Any:
    """Open a compressed file so that a bad stream after a good one raises, and is not the end."""
    decompressing = opened(file)
    decompressing._buffer.raw._trailing_error = ()
    return decompressing


def _zstd(file: Any) -> Any:
    """Decompress a zstd file by pyarrow. Other libraries do not notice a file that is cut off."""
    return import_pyarrow("zstd").CompressedInputStream(file, "zstd")


DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {  # by the first bytes of a compressed file
    rb"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    rb"\x28\xb5\x2f\xfd": _zstd,
    rb"\xfd7zXZ\0": lambda file: _all_streams(lzma.LZMAFile, file),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": lambda file: _all_streams(bz2.BZ2File, file),
}
DAMAGES = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what damaged compressed files raise


def decompressed(file: Any) -> Any:
    """Return a buffered file as it is, or decompressed if it begins as a compressed one.

    Raises:
        ConfigError: pyarrow is needed for it, and not installed.
    """
    head = file.peek(10)
    for begin, decompress in DECOMPRESSORS.items():
        if re.match(begin, head, re.DOTALL):
            return io.BufferedReader(decompress(file), HEAD_BYTES)
    return file


def import_pyarrow(what: str) -> Any:
    """Return the module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{what} needs pyarrow; pip install 'mingpt_ddp[data]'") from error
    return pyarrow


def kind_of_file(path: Path) -> Kind:
    """Return the format of a file: by its suffix, if that says it, else by its first bytes."""
    suffix = PurePosixPath(re.sub(r"\.(gz|bz2|xz|zst)$", "", path.name)).suffix.lower()
    if suffix in SUFFIXES and path.stat().st_size:
        return SUFFIXES[suffix]
    try:
        with open(path, "rb") as raw, decompressed(raw) as file:
            return kind_of(file.read(HEAD_BYTES))
    except DAMAGES:  # damage is reported when the file is read
        return TEXT


def kind_of(head: bytes) -> Kind:
    """Return the format of content: TEXT if it is UTF-8 and in no other format.

    Args:
        head: The first HEAD_BYTES, decompressed. If it is shorter, it is the whole content.
    """
    text = _decoded(head, "utf-8")
    controls = len(head) - len(head.translate(None, CONTROLS))
    if text is None or controls:
        if kind := _binary_format(head):
            return kind
        if b"\0" in head:
            return BINARY
        if text is None:
            return NOT_UTF8
        if controls >= max(MIN_FLOOD, FLOOD * len(head)):
            return FLOODED
    return _kind_of_json(text or "", is_whole=len(head) < HEAD_BYTES) or TEXT


def is_hidden(name: str) -> bool:
    """Return whether a file, or a directory that it is in, is hidden."""
    parts = {*name.split("/")} - {".", ".."}
    return any(part.startswith((".", "__MACOSX")) for part in parts)


def is_utf8(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without NUL, whatever else they look like."""
    return b"\0" not in head and _decoded(head, "utf-8") is not None


def _decoded(head: bytes, encoding: str) -> str | None:
    """Return the text of bytes that may end within a character; None: they are not so encoded."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _binary_format(head: bytes) -> Kind | None:
    for kind, pattern in FORMATS.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    for encoding in WIDE_ENCODINGS:
        if _is_written(head, encoding):
            return Kind(encoding, CONVERT.format(encoding))
    return None


def _is_written(head: bytes, encoding: str) -> bool:
    """Return whether bytes are words or lines in an encoding, without characters that no text has.

    Tokens of 16 bits, as of nanoGPT, have control characters or characters without a meaning.
    """
    text = _decoded(head[:ENCODED_BYTES], encoding) or ""
    categories = {unicodedata.category(character) for character in {*text} - {*"\t\n\f\r"}}
    return not {*" \n"}.isdisjoint(text) and categories.isdisjoint(("Cc", "Cn", "Co", "Cs"))


def _kind_of_json(text: str, is_whole: bool) -> Kind | None:
    """Recognize lines that are JSON objects, and one array of objects.

    Args:
        is_whole: the text does not go on.
    """
    text = text.lstrip("\ufeff \t\r\n")
    if array := ARRAY.match(text):
        end = _object_end(text, array.end())
        is_cut = end == len(text)
        is_array = end and AFTER_OBJECT.match(text, end) and not (is_cut and is_whole)
        return JSON_ARRAY if is_array else None
    if not text.startswith("{"):
        return None
    *lines, last = text.rstrip().split("\n")
    if not all(map(_is_object, lines)):
        return None
    is_cut = not is_whole or bool(lines)  # the last may be cut off, in the file too
    is_json = _object_end(last, 0) == len(last) if is_cut else _is_object(last)
    return JSON_LINES if is_json else None


def _object_end(text: str, begin: int) -> int | None:
    """Return where a JSON object ends, or the text in the middle of one; None: there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except RecursionError:
        return None
    except json.JSONDecodeError as error:
        return len(text) if _value_is_cut(error, text) else None


def _value_is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Return whether JSON is wrong only because the text ends in the middle of it."""
    return error.pos >= len(text) - LONGEST_LITERAL or "Unterminated" in error.msg


def _is_object(line: str) -> bool:
    """Return whether a line is a JSON object, or blank."""
    if not line.strip():
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
