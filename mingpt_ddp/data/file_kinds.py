"""Recognize content that is no text, by its first bytes.

Prose and code must never be refused: the magic number of a format counts only if other bytes say
that this is no text, and lines of JSON only if all of them are objects.
"""

import codecs
import json
import re
import unicodedata
from dataclasses import dataclass

HEAD_BYTES = 1 << 18  # of a text, which are looked at
ENCODED_BYTES = 1 << 13  # of the head, to recognize UTF-16
FLOOD = 0.1  # share of control characters that no text has
MIN_FLOOD = 16  # control characters
# Control characters that no text has. Terminals write backspace, tab, form feed and escape, chats
# the codes of colours, records their separators.
CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1b", *b"\x02\x03\x0f\x16", *range(28, 32)})
READ = "read it with a reader of your own (docs/your-own-model.md)"
EXTRACT = "extract its text first"
DECOMPRESS = "decompress it first, or compress it with gzip"
READ_AS_TEXT = f"{READ}, or as text with data.format=text"
READ_RECORDS = "read it with data.format={}"
TAKE_TOKENS = f"if these are tokens, add data.format=tokens (docs/data.md), else {READ}"
CONVERT = "convert it: iconv -f {} -t UTF-8 OLD >NEW"


@dataclass(frozen=True)
class Kind:
    """What content is that is no text, and what to do with it."""

    name: str
    advice: str
    form: str | None = None  # by which it can be read, as data.format


HIDDEN = Kind("hidden", "")
NOT_UTF8 = Kind("not UTF-8", CONVERT.format("ISO-8859-1"))
BINARY = Kind("binary data with NUL bytes, such as tokens", TAKE_TOKENS)
FLOODED = Kind("binary data with control characters", READ_AS_TEXT)
PARQUET = Kind("Parquet", READ_RECORDS.format("parquet"), "parquet")
ARROW = Kind("Arrow", READ_RECORDS.format("parquet"), "parquet")
TEXT = Kind("text", "", "text")
CSV = Kind("CSV", READ_RECORDS.format("csv"), "csv")
JSON_LINES = Kind("JSON Lines", READ_RECORDS.format("jsonl"), "jsonl")
JSON_ARRAY = Kind("a JSON array of objects", READ_RECORDS.format("jsonl"), "jsonl")
OFFICE = Kind("an Office document", EXTRACT)
SAVED_DATASET = Kind(
    "a save_to_disk folder of Hugging Face datasets", READ_RECORDS.format("parquet"), "parquet"
)
COMPRESSED = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "xz": rb"\xfd7zXZ\0",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
}
FORMATS = {
    PARQUET: rb"PAR1",
    ARROW: rb"ARROW1\0\0|FEA1|\xff{4}.{3}\0",
    Kind("NumPy", TAKE_TOKENS): rb"\x93NUMPY",
    Kind("safetensors", READ): rb".{5}\0{3}\{\"",
    Kind("HDF5", READ): rb"\x89HDF\r\n\x1a\n",
    Kind("SQLite", READ): rb"SQLite format 3\0",
    Kind("a pickle", EXTRACT): rb"\x80[\x02-\x05]",
    Kind("PNG", EXTRACT): rb"\x89PNG\r\n\x1a\n",
    Kind("JPEG", EXTRACT): rb"\xff\xd8\xff",
    Kind("GIF", EXTRACT): rb"GIF8[79]a",
    Kind("WebP", EXTRACT): rb"RIFF.{4}WEBP",
    Kind("BMP", EXTRACT): rb"BM.{4}\0{4}",
    Kind("TIFF", EXTRACT): rb"II\*\0|MM\0\*",
    Kind("an ELF program", EXTRACT): rb"\x7fELF",
    Kind("zip", "unpack it first"): rb"PK\x03\x04",
    **{Kind(name, DECOMPRESS): COMPRESSED[name] for name in ("zstd", "xz", "bzip2")},
}
PDF = Kind("PDF", EXTRACT)
WIDE_ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")  # with a BOM or without
AFTER_OBJECT = re.compile(r"\s*(,\s*(\{|$)|\]?\s*$)")  # in an array of objects
LONGEST_LITERAL = 6  # characters: \u0000
ARRAY = re.compile(r"\[\s*(?=\{)")
# Kinds by the names of files and directories, in lower case.
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)


def kind_of(head: bytes) -> Kind | None:
    """Return what content is that is no text in UTF-8; None: it is one.

    Args:
        head: its first HEAD_BYTES, decompressed; fewer: it is the whole content.
    """
    text = _decoded(head, "utf-8")
    controls = len(head) - len(head.translate(None, CONTROLS))
    if head.startswith(b"%PDF-") and b" obj" in head:
        return PDF
    if text is None or controls:
        if kind := _binary_format(head):
            return kind
        if b"\0" in head:
            return BINARY
        if text is None:
            return NOT_UTF8
        if controls >= max(MIN_FLOOD, FLOOD * len(head)):
            return FLOODED
    return _kind_of_json(text or "", is_whole=len(head) < HEAD_BYTES)


def kind_of_names(names: set[str]) -> Kind | None:
    """Return what a directory or an archive is that is no collection of texts.

    Args:
        names: of its files.
    """
    if "[Content_Types].xml" in names:
        return OFFICE
    is_saved = "dataset_dict.json" in names or names >= {"dataset_info.json", "state.json"}
    if is_saved and any(name.endswith(".arrow") for name in names):
        return SAVED_DATASET
    return None


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
        return len(text) if value_is_cut(error, text) else None


def value_is_cut(error: json.JSONDecodeError, text: str) -> bool:
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
