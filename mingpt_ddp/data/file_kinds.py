"""Recognize the format of a file by its name and its first bytes.

Prose and code must never be refused. A text therefore counts as JSON Lines only if each of its
lines is an object.
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

from mingpt_ddp.config.keys.components import TextFormat
from mingpt_ddp.errors import ConfigError, DataError

HEAD_BYTES = 1 << 18  # number of bytes at the start of a text that decide its format
WIDE_CHECK_BYTES = 1 << 13  # number of bytes of the head that are checked for UTF-16 and UTF-32
# A text is refused if unexpected control characters are at least this share of its bytes, and at
# least this many.
FLOOD_SHARE = 0.1
FLOOD_MIN_COUNT = 16
# Control characters that are unexpected in a text. Texts do contain some others:
# terminal output has backspace, tab, form feed and escape, IRC logs have codes for bold and colours
# (0x02, 0x03, 0x0f, 0x16), and 0x1c to 0x1f separate records.
CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1b", *b"\x02\x03\x0f\x16", *range(28, 32)})
USE_READER = "read it with a reader of your own (docs/your-own-model.md)"
CONVERT = "convert it: iconv -f {} -t UTF-8 OLD >NEW"
READ_RECORDS = "read it with data.format={}"
NOT_TEXT_ADVICE = (
    f"{CONVERT.format('ISO-8859-1')}; or, if these are tokens, add data.format=tokens "
    f"(docs/data.md); or {USE_READER}"
)


@dataclass(frozen=True)
class Kind:
    """The format of a file, with advice for a file that is not text.

    Attributes:
        name: Name of the format in messages.
        advice: How to read such a file, or how to convert it to text.
        form: The data.format that reads such a file, or None.
    """

    name: str
    advice: str
    form: TextFormat | None = None

    def refusal(self, source: str, path: str, wanted: str) -> DataError:
        """Make the error that refuses a file of this format.

        Args:
            source: Name of the text in messages.
            path: Path of the file, for the advice.
            wanted: Name of the expected format.
        """
        advice = self.advice.replace("FILE", path)
        return DataError(f"{source} looks like {self.name}, not {wanted}; {advice}")


TEXT = Kind("text", "", "text")
CSV = Kind("CSV", READ_RECORDS.format("csv"), "csv")
JSON_LINES = Kind("JSON Lines", READ_RECORDS.format("jsonl"), "jsonl")
JSON_ARRAY = Kind("a JSON array of objects", READ_RECORDS.format("jsonl"), "jsonl")
PARQUET = Kind("Parquet", READ_RECORDS.format("parquet"), "parquet")
ARROW = Kind("Arrow", "write it as Parquet: dataset.to_parquet('data.parquet')")
NUMPY = Kind(
    "NumPy", f"if these are tokens, add data.format=tokens (docs/data.md), else {USE_READER}"
)
NOT_UTF8 = Kind("binary data or text that is not UTF-8", NOT_TEXT_ADVICE)
BINARY = Kind("binary data with NUL bytes, such as tokens", NOT_TEXT_ADVICE)
FLOODED = Kind(
    "binary data with many control characters",
    f"{USE_READER}, or as text with data.format=text",
)
ARCHIVE_ADVICE = "name the files in it: 'data.path=\"{}://**::FILE\"'"
ZIP = Kind("a zip archive", ARCHIVE_ADVICE.format("zip"))
TAR = Kind("a tar archive", ARCHIVE_ADVICE.format("tar"))
SUFFIXES = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
}
# Patterns of the first bytes of a file, by format.
MAGIC_PATTERNS = {
    PARQUET: rb"PAR1",
    ARROW: rb"ARROW1\0\0|FEA1|\xff{4}.{3}\0",
    NUMPY: rb"\x93NUMPY",
    ZIP: rb"PK\x03\x04|PK\x05\x06",
    TAR: rb".{257}ustar",
}
WIDE_ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")  # with or without a BOM
# Matches the text after the first object of an array: a comma, the end of the array, or the end of
# text that was cut off.
AFTER_OBJECT = re.compile(r"\s*(,\s*(\{|$)|\]?\s*$)")
# If a text is cut off within a JSON value, the parser reports an error near the end of the text: at
# the start of the unfinished literal, such as `false`, or escape, such as \u0000. An error in the
# last MAX_UNFINISHED_CHARS characters may therefore only mean that the text was cut off.
MAX_UNFINISHED_CHARS = 6
ARRAY = re.compile(r"\[\s*(?=\{)")
# The split that a word in the name of a file or directory stands for. The words are in lower case.
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)


def _all_streams(opened: Callable[[Any], Any], file: Any) -> Any:
    """Open a compressed file so that a damaged stream after a good one raises an exception.

    Python's modules would otherwise take the damage for the end of the file.
    """
    decompressing = opened(file)
    decompressing._buffer.raw._trailing_error = ()
    return decompressing


def _zstd(file: Any) -> Any:
    """Decompress a zstd file with pyarrow. Other libraries do not notice if a file is cut off."""
    return import_pyarrow("zstd").CompressedInputStream(file, "zstd")


# Functions that decompress a file, by a pattern of the file's first bytes.
DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    rb"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    rb"\x28\xb5\x2f\xfd": _zstd,
    rb"\xfd7zXZ\0": lambda file: _all_streams(lzma.LZMAFile, file),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": lambda file: _all_streams(bz2.BZ2File, file),
}
# Exceptions that reading a damaged compressed file raises.
DAMAGES = (OSError, EOFError, zlib.error, lzma.LZMAError)


def decompressed(file: Any) -> Any:
    """Decompress a buffered file if its first bytes say that it is compressed.

    Any other file is returned as it is.

    Raises:
        ConfigError: The file needs pyarrow, which is not installed.
    """
    head = file.peek(10)
    for begin, decompress in DECOMPRESSORS.items():
        if re.match(begin, head, re.DOTALL):
            return io.BufferedReader(decompress(file), HEAD_BYTES)
    return file


def import_pyarrow(what: str) -> Any:
    """Import pyarrow.

    Args:
        what: The feature that needs pyarrow, for the error message.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{what} needs pyarrow; pip install 'mingpt_ddp[data]'") from error
    return pyarrow


def kind_of_file(path: Path) -> Kind:
    """Recognize the format of a file by its suffix, or if the suffix is unknown, by its content."""
    suffix = PurePosixPath(re.sub(r"\.(gz|bz2|xz|zst)$", "", path.name)).suffix.lower()
    if suffix in SUFFIXES and path.stat().st_size:
        return SUFFIXES[suffix]
    try:
        with open(path, "rb") as raw, decompressed(raw) as file:
            return kind_of(file.read(HEAD_BYTES))
    # Damage is reported later, when the file is read as text.
    except DAMAGES:
        return TEXT


def kind_of(head: bytes) -> Kind:
    """Recognize the format of a file's content.

    The format is TEXT if the content is UTF-8 and does not look like any other format.

    Args:
        head: The first HEAD_BYTES of the content, decompressed. If there are fewer bytes, they are
            the whole content.
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
        if controls >= max(FLOOD_MIN_COUNT, FLOOD_SHARE * len(head)):
            return FLOODED
    return _kind_of_json(text or "", is_whole=len(head) < HEAD_BYTES) or TEXT


def is_hidden(name: str) -> bool:
    """Return True if a file, or a directory above it, is hidden."""
    parts = {*name.split("/")} - {".", ".."}
    return any(part.startswith((".", "__MACOSX")) for part in parts)


def is_utf8(head: bytes) -> bool:
    """Return True if bytes are UTF-8 without NUL, even if they look like another format."""
    return b"\0" not in head and _decoded(head, "utf-8") is not None


def _decoded(head: bytes, encoding: str) -> str | None:
    """Decode bytes that may end within a character. Return None if they have another encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _binary_format(head: bytes) -> Kind | None:
    for kind, pattern in MAGIC_PATTERNS.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    for encoding in WIDE_ENCODINGS:
        if _is_prose(head, encoding):
            return Kind(encoding, CONVERT.format(encoding))
    return None


def _is_prose(head: bytes, encoding: str) -> bool:
    """Return True if bytes are words or lines in this encoding.

    Files of 16-bit tokens, such as nanoGPT's, are valid UTF-16 too. But they contain control
    characters or unassigned characters, which no text has.
    """
    text = _decoded(head[:WIDE_CHECK_BYTES], encoding) or ""
    categories = {unicodedata.category(character) for character in {*text} - {*"\t\n\f\r"}}
    return not {*" \n"}.isdisjoint(text) and categories.isdisjoint(("Cc", "Cn", "Co", "Cs"))


def _kind_of_json(text: str, is_whole: bool) -> Kind | None:
    """Recognize JSON Lines, and a JSON array of objects.

    Args:
        text: The head of the content.
        is_whole: True if the head is the whole content.
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
    # The last line may be cut off: by the end of the head, or in an unfinished file.
    is_cut = not is_whole or bool(lines)
    is_json = _object_end(last, 0) == len(last) if is_cut else _is_object(last)
    return JSON_LINES if is_json else None


def _object_end(text: str, begin: int) -> int | None:
    """Find the end of the JSON object that begins at `begin`.

    Return the end of the text if the object is cut off there, and None if it is not an object.
    """
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except RecursionError:
        return None
    except json.JSONDecodeError as error:
        return len(text) if _value_is_cut(error, text) else None


def _value_is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Return True if JSON is invalid only because the text ends in the middle of it."""
    return error.pos >= len(text) - MAX_UNFINISHED_CHARS or "Unterminated" in error.msg


def _is_object(line: str) -> bool:
    """Return True if a line is a JSON object or blank."""
    if not line.strip():
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
