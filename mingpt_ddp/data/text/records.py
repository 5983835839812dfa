"""Records of JSON Lines, JSON arrays and tables in CSV: one at a time, in bounded memory."""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from mingpt_ddp.data.content import HEAD_BYTES, value_is_cut
from mingpt_ddp.errors import DataError

MAX_RECORD = 1 << 29  # bytes of a line, characters of an object in an array
csv.field_size_limit(MAX_RECORD)  # of this process; 128 KiB by default
HEAD_ROWS = 100  # which are looked at for columns of strings
HEAD_CHARS = 1 << 20
SPACE = re.compile(r"[ \t\r\n]*")
DELIMITERS = ",\t;"
TABLES = (".csv", ".tsv")
JSON_TYPES = {dict: "objects", list: "arrays", bool: "booleans", int: "numbers", float: "numbers"}


@dataclass(frozen=True)
class Table:
    """The rows of a file.

    Attributes:
        strings: the columns of strings.
        types: what the other columns hold.
        values: iterates over those of a column; None: null.
    """

    strings: list[str]
    types: dict[str, str]
    values: Callable[[str], Iterator[str | None]]


def choose_column(table: Table, column: str | None, where: str) -> str:
    """Return the column of the texts.

    Args:
        column: `data.column`.

    Raises:
        DataError: there is no such column, or there are several of strings.
    """
    if column in table.strings:
        return str(column)
    known = [*table.strings, *(f"{name} of {kind}" for name, kind in table.types.items())]
    has = f"it has {', '.join(known)[:300]}" if known else "it has none"
    if column is not None:
        raise DataError(f"{where} has no column of strings data.column={column}; {has}")
    if not table.strings:
        raise DataError(f"{where} has no column of strings; {has}")
    if len(table.strings) > 1:
        names = ", ".join(table.strings)[:300]
        raise DataError(
            f"{where} has several columns of strings: {names}; choose one, as "
            f"data.column={'text' if 'text' in table.strings else table.strings[0]}"
        )
    return table.strings[0]


def json_table(file: io.BufferedReader, where: str) -> Table:
    """Return the rows of lines that are JSON objects, or of one array of objects."""
    head = file.peek(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    unit, read = ("object", _array) if head.startswith(b"[") else ("line", _lines)
    rows = read(file, where)
    first = _head(rows, lambda row: sum(len(value) for value in row.values() if _is_text(value)))
    types: dict[str, str] = {}
    strings: dict[str, None] = {}  # in order
    for _, row in first:
        for name, value in row.items():
            if _is_text(value):
                strings[name] = None
            elif value is not None:
                types.setdefault(name, JSON_TYPES[type(value)])

    def values(column: str) -> Iterator[str | None]:
        has_rows = has_column = False
        for number, row in chain(first, rows):
            has_rows = True
            has_column |= column in row
            value = row.get(column)
            if not (value is None or _is_text(value)):
                raise DataError(
                    f"{where} {unit} {number}: {column} is one of {JSON_TYPES[type(value)]}, "
                    "no string"
                )
            if value and _has_surrogate(value):
                raise DataError(
                    f"{where} {unit} {number}: {column} has half of a surrogate pair, which UTF-8 "
                    "cannot hold; remove it"
                )
            yield value
        if has_rows and not has_column:
            raise DataError(
                f"{where} has no data.column={column} in any {unit}; name the files that have it "
                "by a glob"
            )

    return Table([*strings], {k: v for k, v in types.items() if k not in strings}, values)


def csv_table(file: io.BufferedReader, where: str) -> Table:
    """Return the rows of CSV or TSV with a header."""
    lines = _text_lines(file, where)
    first_line = next(lines, "")
    reader = csv.reader(chain([first_line], lines), strict=True, delimiter=_delimiter(first_line))
    rows = enumerate(_csv_rows(reader, where))
    _, names = next(rows, (0, []))
    if not _is_header(names):
        raise DataError(f"{where} has no header with a name for each column in its first line")
    first = _head(rows, lambda row: sum(map(len, row)))
    strings = []
    for i, name in enumerate(names):
        if not all(_is_number(row[i]) for _, row in first):
            strings.append(name)

    def values(column: str) -> Iterator[str | None]:
        i = names.index(column)
        for _, row in chain(first, rows):
            yield row[i]

    return Table(strings, {name: "numbers" for name in names if name not in strings}, values)


def is_table(head: bytes, name: str) -> bool:
    """Return whether a file that is called a table is one: of columns with names.

    Prose with commas has rows of different lengths.

    Args:
        head: its first HEAD_BYTES, decompressed; fewer: it is the whole content.
    """
    if not name.lower().endswith(TABLES):
        return False
    text = codecs.getincrementaldecoder("utf-8-sig")("replace").decode(head)
    lines = text.splitlines(keepends=True)
    try:
        rows = [*filter(None, csv.reader(lines, delimiter=_delimiter(*lines[:1])))]
    except csv.Error:
        return False
    if len(head) == HEAD_BYTES:
        rows.pop()  # it may be cut off
    is_wide = len(rows) > 1 and (len(rows[0]) > 1 or rows[0] == ["text"])
    return is_wide and _is_header(rows[0]) and len({*map(len, rows)}) == 1


def _delimiter(line: str = "") -> str:
    return max(DELIMITERS, key=line.count)


def _is_header(names: list[str]) -> bool:
    is_named = all(name and not _is_number(name) for name in names)
    return bool(names) and is_named and len({*names}) == len(names)


def _csv_rows(reader: Any, where: str) -> Iterator[list[str]]:
    """Yield the header, and rows with as many fields."""
    width = None
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{where} line {reader.line_num} is no CSV: {error}") from error
        if row is None:
            return
        if not row:  # a blank line
            continue
        width = width or len(row)
        if len(row) != width:
            raise DataError(
                f"{where} line {reader.line_num}: a row of {len(row)} fields, the header has "
                f"{width}"
            )
        yield row


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _has_surrogate(text: str) -> bool:
    """Return whether UTF-8 cannot hold a text; JSON can, by an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True


def _head(rows: Iterable[Any], length: Callable[[Any], int]) -> list[Any]:
    """Take the first rows, fewer if they are long."""
    head = []
    total = 0
    for number, row in islice(rows, HEAD_ROWS):
        head.append((number, row))
        total += length(row)
        if total > HEAD_CHARS:
            break
    return head


def _text_lines(file: io.BufferedReader, where: str) -> Iterator[str]:
    """Yield lines with their ends.

    Raises:
        DataError: one is not UTF-8, or too long.
    """
    number = 0
    while line := file.readline(MAX_RECORD + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) > MAX_RECORD:
            raise _too_long(f"{where} line {number}")
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where} line {number} is not UTF-8 at byte {error.start}") from error


def _too_long(where: str) -> DataError:
    return DataError(f"{where} has over {MAX_RECORD:,} bytes; divide it")


def _lines(file: io.BufferedReader, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text_lines(file, where), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} line {number} is no JSON object")
        yield number, row


class _ArrayText:
    """The text of a JSON array, of which what has been taken is dropped."""

    def __init__(self, file: io.BufferedReader, where: str) -> None:
        self._file = file
        self._where = where
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0

    def peek(self) -> str:
        """Return the next character that is no space; "": there is none."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._extend():
                return ""

    def take(self) -> str:
        character = self.peek()
        self._at += 1
        return character

    def take_row(self, where: str) -> dict[str, Any]:
        """
        Raises:
            DataError: there is no whole object, or a longer one than MAX_RECORD.
        """
        while self.peek() == "{":
            try:
                row: dict[str, Any]
                row, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_RECORD:
                    raise _too_long(where) from error
                if not (value_is_cut(error, self._text) and self._extend()):
                    raise DataError(f"{where} is no JSON: {error.msg}") from error
                continue
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is no JSON: {error}") from error
            self._at = end
            return row
        raise DataError(f"{where} is no JSON object")

    def _extend(self) -> bool:
        """Read as much again as is left; return whether there was more."""
        left = self._text[self._at :]
        chunk = self._file.read(max(HEAD_BYTES, len(left)))
        try:
            self._text = left + self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._where} is not UTF-8: {error}") from error
        self._at = 0
        return bool(chunk)


def _array(file: io.BufferedReader, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of an array."""
    text = _ArrayText(file, where)
    text.take()  # [
    number = 0
    while text.peek() != "]":
        if number and text.take() != ",":
            raise DataError(f"{where} is cut off or no JSON after object {number}")
        number += 1
        yield number, text.take_row(f"{where} object {number}")
    text.take()
    if text.peek():
        raise DataError(f"{where} goes on after the end of its array")
