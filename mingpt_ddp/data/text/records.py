"""Read records from JSON Lines, JSON arrays and CSV."""

import codecs
import csv
import difflib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from mingpt_ddp.data.file_kinds import HEAD_BYTES, NOT_UTF8, USE_READER
from mingpt_ddp.errors import DataError, counted

MAX_RECORD = 1 << 29  # largest size of a line in bytes
MAX_ARRAY = 1 << 28  # largest size of a JSON array in bytes
csv.field_size_limit(MAX_RECORD)  # applies to this whole process; the default is 128 KiB
# Look for columns of strings in at most this many rows with this many characters.
HEAD_ROWS = 100
HEAD_CHARS = 1 << 20
DELIMITERS = ",\t;"
AS_TEXT = "to read it as it is, set data.format=text"
# Plural names of JSON types for messages. Values of all other types are numbers.
TYPES = {dict: "objects", list: "arrays", bool: "booleans"}
Row: TypeAlias = tuple[int, dict[str, Any]]  # number of the row, and its values by column


@dataclass(frozen=True)
class Table:
    """The rows of a file.

    Attributes:
        strings: Names of the columns that hold strings.
        types: For each other column, the plural name of its type, such as "numbers".
        values: Takes the name of a column. Yields the number of each row and its value in this
            column, or None if the row has no value there.
    """

    strings: list[str]
    types: dict[str, str]
    values: Callable[[str], Iterator[tuple[int, str | None]]]


def choose_column(table: Table, column: str | None, where: str) -> str:
    """Choose the column that holds the texts.

    Args:
        table: The table.
        column: The setting `data.column`, or None to choose the only column of strings.
        where: Name of the file in messages.

    Raises:
        DataError: The table has no such column of strings. Or no column is named, and the table
            does not have exactly one column of strings.
    """
    if column in table.strings:
        return str(column)
    if column is not None and column in table.types:
        raise DataError(
            f'{where}: the column "{column}" (data.column={column}) holds {table.types[column]}, '
            f"not text; {_columns(table)}"
        )
    if column is not None:
        raise DataError(
            f'{where} has no column "{column}" (data.column={column}); {_columns(table, column)}'
        )
    if len(table.strings) != 1:
        count = "several columns" if table.strings else "no column"
        raise DataError(f"{where} has {count} of text; {_columns(table)}")
    return table.strings[0]


def _columns(table: Table, wanted: str = "text") -> str:
    """List the columns, and suggest a value for `data.column`. This is the end of a message."""
    types = [f"{name} ({kind})" for name, kind in table.types.items()]
    has = f"its columns are {', '.join([*table.strings, *types])[:300] or 'not named'}"
    if not table.strings:
        return f"{has}; {USE_READER}"
    best = [*difflib.get_close_matches(wanted, table.strings), *table.strings][0]
    return f"{has}: set data.column={best}"


def json_table(file: io.BufferedReader, where: str) -> Table:
    """Open JSON Lines, or a JSON array of objects, as a table.

    Args:
        file: The open file.
        where: Name of the file in messages.
    """
    head = file.peek(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        return _table(_array(file, where), _is_text, where, "object")
    return _table(_lines(file, where), _is_text, where, "line")


def csv_table(file: io.BufferedReader, where: str) -> Table:
    """Open CSV or TSV with a header as a table.

    Args:
        file: The open file.
        where: Name of the file in messages.
    """
    return _table(_csv_rows(file, where), _is_word, where, "line")


def _table(rows: Iterator[Row], is_text: Callable[[Any], bool], where: str, unit: str) -> Table:
    """Make a table of rows. A column holds strings if one of its first values is a text.

    Args:
        rows: The rows.
        is_text: Returns True for a value that is a text.
        where: Name of the file in messages.
        unit: Name of a row in messages, such as "line".
    """
    head: list[Row] = []
    size = 0
    while len(head) < HEAD_ROWS and size < HEAD_CHARS and (first := next(rows, None)):
        head.append(first)
        size += sum(len(value) for value in first[1].values() if _is_text(value))
    strings: dict[str, None] = {}  # names of columns, in order and without repetition
    others: dict[str, str] = {}
    for _, row in head:
        for name, value in row.items():
            if is_text(value):
                strings[name] = None
            elif value is not None:
                others.setdefault(name, TYPES.get(type(value), "numbers"))

    def values(column: str) -> Iterator[tuple[int, str | None]]:
        has_column = not head
        for number, row in chain(head, rows):
            has_column |= column in row
            value = row.get(column)
            if not (value is None or _is_text(value)):
                raise DataError(
                    f"{where} {unit} {number}: the column {column} holds "
                    f"{TYPES.get(type(value), 'numbers')}, not text; remove the {unit}, or choose "
                    "another data.column"
                )
            if value and _has_surrogate(value):
                raise DataError(
                    f"{where} {unit} {number}: {column} has half of a surrogate pair, which UTF-8 "
                    "cannot hold; remove it"
                )
            yield number, value
        if not has_column:
            raise DataError(
                f'{where} has no column "{column}" (data.column={column}) in any {unit}; name the '
                "files that have it by a glob"
            )

    others = {name: kind for name, kind in others.items() if name not in strings}
    return Table([*strings], others, values)


def _csv_rows(file: io.BufferedReader, where: str) -> Iterator[Row]:
    """Yield the rows after the header.

    The separator is the character of DELIMITERS that is most frequent in the header.

    Raises:
        DataError: The file is not CSV in UTF-8, has no header, or has a row with more or fewer
            fields than the header.
    """
    lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader: csv.DictReader[str] | None = None
    try:
        first = lines.readline()
        delimiter = max(DELIMITERS, key=first.count)
        reader = csv.DictReader(chain([first], lines), strict=True, delimiter=delimiter)
        header = [*(reader.fieldnames or [])]
        if not (header and all(map(_is_word, header)) and len({*header}) == len(header)):
            raise DataError(
                f"{where} has no header with a name for each column in its first line; {AS_TEXT}"
            )
        for row in reader:
            fields = [value for value in row.values() if value is not None]
            if None in row or len(fields) < len(header):
                count = len(fields) - 1 + len(row.get(None, [None]))
                raise DataError(
                    f"{where} line {reader.line_num} has {counted(count, 'field')}, but the header "
                    f"has {len(header)}; {AS_TEXT}"
                )
            yield reader.line_num, row
    except csv.Error as error:
        line = reader.reader.line_num if reader else 1
        raise DataError(f"{where} line {line} is not CSV: {error}; {AS_TEXT}") from error
    except UnicodeDecodeError as error:
        line = reader.line_num if reader else 0
        raise DataError(f"{where} is not UTF-8 after line {line}; {NOT_UTF8.advice}") from error
    finally:
        # Otherwise `lines` would close the file, which must be read to its end to be hashed.
        lines.detach()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _has_surrogate(text: str) -> bool:
    """Return True if a text has half of a surrogate pair. JSON can hold it, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_word(cell: str) -> bool:
    """Return True if a CSV cell holds something that is not a number."""
    try:
        float(cell or 0)
    except ValueError:
        return True
    return False


def _text_lines(file: io.BufferedReader, where: str) -> Iterator[str]:
    """Yield the lines of a file with their line ends.

    Raises:
        DataError: A line is not UTF-8, or is too long.
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
            raise DataError(
                f"{where} line {number} is not UTF-8 at byte {error.start}; {NOT_UTF8.advice}"
            ) from error


def _too_long(where: str) -> DataError:
    return DataError(f"{where} has over {MAX_RECORD:,} bytes; split the line")


def _lines(file: io.BufferedReader, where: str) -> Iterator[Row]:
    """Yield the objects of JSON Lines. Blank lines are skipped."""
    for number, line in enumerate(_text_lines(file, where), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} line {number} is not JSON: {error}; correct it, or remove it"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{where} line {number} is not a JSON object; {AS_TEXT}")
        yield number, row


def _array(file: io.BufferedReader, where: str) -> Iterator[Row]:
    """Yield the objects of a JSON array. It is read into memory as a whole."""
    content = file.read(MAX_ARRAY + 1)
    if len(content) > MAX_ARRAY:
        raise DataError(
            f"{where} is a JSON array of over {MAX_ARRAY:,} bytes; write it as JSON Lines, which "
            "are read line by line: jq -c '.[]' OLD.json >NEW.jsonl"
        )
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 at byte {error.start}; {NOT_UTF8.advice}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is cut off or not JSON: {error}; copy it again, or {AS_TEXT}"
        ) from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{where} item {number} is not a JSON object; {AS_TEXT}")
        yield number, row
