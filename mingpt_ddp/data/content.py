"""Recognize content that is no text, by its first bytes, and count what a text consists of.

Prose and code must never be refused: the magic number of a format counts only if other bytes say
that this is no text, and lines of JSON only if all of them are objects. CSV stays a text: its
rows look like prose with commas.
"""

import codecs
import json
import logging
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mingpt_ddp.errors import DataError, counted

log = logging.getLogger(__name__)

HEAD_BYTES = 1 << 18  # of a text, which are looked at
ENCODED_BYTES = 1 << 13  # of the head, to recognize UTF-16
FLOOD = 0.1  # share of control characters that no text has
MIN_FLOOD = 16  # control characters
MAX_KINDS = 5  # in a line of the log
MAX_NAMES = 3  # of a kind
MAX_NAME = 100  # characters
# those that no text has; terminals write backspace, tab, form feed and escape, chats the codes of
# colours, records their separators
CONTROLS = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1b", *b"\x02\x03\x0f\x16", *range(28, 32)})
READ = "read it with a reader of your own (docs/your-own-model.md)"
EXTRACT = "extract its text first"
DECOMPRESS = "decompress it first, or compress it with gzip"
READ_AS_TEXT = f"{READ}, or as text with data.format=text"
TAKE_TOKENS = f"if these are tokens, add data.format=tokens (docs/data.md), else {READ}"
CONVERT = "convert it: iconv -f {} -t UTF-8 OLD >NEW"


@dataclass(frozen=True)
class Kind:
    """What content is that is no text, and what to do with it."""

    name: str
    advice: str


HIDDEN = Kind("hidden", "")
NOT_UTF8 = Kind("not UTF-8", CONVERT.format("ISO-8859-1"))
BINARY = Kind("binary data with NUL bytes, such as tokens", TAKE_TOKENS)
FLOODED = Kind("binary data with control characters", READ_AS_TEXT)
JSON_LINES = Kind("JSON Lines", READ_AS_TEXT)
JSON_ARRAY = Kind("a JSON array of objects", READ_AS_TEXT)
OFFICE = Kind("an Office document", EXTRACT)
SAVED_DATASET = Kind("a save_to_disk folder of Hugging Face datasets", READ)
FORMATS = {
    Kind("Parquet", READ): rb"PAR1",
    Kind("Arrow", READ): rb"ARROW1\0\0|FEA1|\xff{4}.{3}\0",
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
    Kind("zstd", DECOMPRESS): rb"\x28\xb5\x2f\xfd",
    Kind("xz", DECOMPRESS): rb"\xfd7zXZ\0",
    Kind("bzip2", DECOMPRESS): rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
}
PDF = Kind("PDF", EXTRACT)
WIDE_ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")  # with a BOM or without
AFTER_OBJECT = re.compile(r"\s*(,\s*(\{|$)|\]?\s*$)")  # in an array of objects
LONGEST_LITERAL = 6  # characters: \u0000
ARRAY = re.compile(r"\[\s*(?=\{)")


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
        is_cut = error.pos >= len(text) - LONGEST_LITERAL or "Unterminated" in error.msg
        return len(text) if is_cut else None


def _is_object(line: str) -> bool:
    """Return whether a line is a JSON object, or blank."""
    if not line.strip():
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@dataclass
class Share:
    """The files of one kind."""

    count: int = 0
    size: int = 0  # bytes, as Member.size
    names: list[str] = field(default_factory=list)  # the first

    def add(self, name: str, size: int) -> None:
        self.count += 1
        self.size += size
        if len(self.names) < MAX_NAMES:
            self.names.append(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...")

    def shown(self, kind: str) -> str:
        """Return the share as in `12 of .md ('a.md', 'b.md', 'c.md', ...)`."""
        more = ", ..." if self.count > len(self.names) else ""
        return f"{self.count:,} {kind} ({', '.join(map(repr, self.names))}{more})"


@dataclass(frozen=True)
class Counts:
    """What a text consists of, as JSON has it."""

    kind: Kind | None
    texts: dict[str, Share]
    skipped: list[tuple[Kind, Share]]


class Contents:
    """What a text consists of, counted while it is read."""

    def __init__(self, source: str, kind: Kind | None = None) -> None:
        """
        Args:
            source: the key that names the text, with its value.
            kind: of the whole; None: a text, or files of their own kinds.
        """
        self.source = source
        self.kind = kind
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.texts: dict[str, Share] = {}  # by the ends of their names
        self.skipped: dict[Kind, Share] = {}

    def counts(self) -> Counts:
        return Counts(self.kind, self.texts, [*self.skipped.items()])

    def restore(self, counts: Counts) -> None:
        """Take what was counted when the same files were read."""
        self.kind = counts.kind
        self.texts = counts.texts
        self.skipped = dict(counts.skipped)

    def add_text(self, name: str, size: int) -> None:
        suffix = PurePosixPath(name).suffix[:MAX_NAME]
        if not suffix or not suffix.isprintable():
            suffix = "without an extension"
        self.texts.setdefault(suffix, Share()).add(name, size)

    def skip(self, name: str, size: int, kind: Kind) -> None:
        self.skipped.setdefault(kind, Share()).add(name, size)

    def none_left(self) -> DataError:
        """Return the error of files that have no text among them."""
        why = f"{self.source} has no texts"
        if self.skipped:
            why = f"{why}: skipped {self._shown_skipped()}"
        largest = self._largest()
        return DataError(f"{why}; {largest.advice}" if largest.advice else why)

    def refuse(self) -> None:
        """Refuse what is no text.

        Raises:
            DataError: says what it looks like, and what to do.
        """
        if self.kind is not None and self.kind != NOT_UTF8:  # the decoder finds the byte
            raise refusal(self.source, self.kind)
        size = sum(share.size for kind, share in self.skipped.items() if kind != HIDDEN)
        total = size + sum(share.size for share in self.texts.values())
        if 2 * size > total:
            raise DataError(
                f"{self.source} is mostly no text: skipped {self._shown_skipped()}, {size:,} of "
                f"{total:,} bytes; name its texts alone by a glob, or {self._largest().advice}"
            )

    def report(self) -> None:
        """Log which files are read, and which are skipped."""
        if self.texts:
            count = sum(share.count for share in self.texts.values())
            size = sum(share.size for share in self.texts.values())
            files = f"{counted(count, 'file')} of {counted(size, 'byte')}"
            log.info("%s: reads %s: %s", self.source, files, _shown(self.texts.items()))
        if self.skipped:
            log.warning("%s: skipped %s", self.source, self._shown_skipped())

    def _largest(self) -> Kind:
        """Return the kind that has most of the skipped bytes, but for hidden files."""
        sizes = {kind: share.size for kind, share in self.skipped.items() if kind != HIDDEN}
        return max(sizes, key=sizes.__getitem__, default=HIDDEN)

    def _shown_skipped(self) -> str:
        return _shown((kind.name, share) for kind, share in self.skipped.items())


def refusal(source: str, kind: Kind) -> DataError:
    return DataError(f"{source} looks like {kind.name}, not text; {kind.advice}")


def _shown(shares: Iterable[tuple[str, Share]]) -> str:
    """Return the largest shares by kind, and how many more kinds there are."""
    ordered = sorted(shares, key=lambda item: -item[1].size)
    texts = [share.shown(kind) for kind, share in ordered[:MAX_KINDS]]
    if len(ordered) > MAX_KINDS:
        texts.append(f"{len(ordered) - MAX_KINDS:,} more kinds")
    return ", ".join(texts)
