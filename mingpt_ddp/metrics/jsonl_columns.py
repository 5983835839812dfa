"""Lines of `metrics.jsonl` as columns of numbers, which take a tenth of the memory of objects."""

import contextlib
import json
import math
from array import array
from collections import defaultdict
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

from pydantic_core import from_json

from mingpt_ddp.errors import DataError

Record: TypeAlias = dict[str, Any]
MARKERS = {"start", "rollback", "complete"}  # keys of records that measure nothing
MAX_VALUE = 1e300
MAX_KEYS = 100_000  # different ones, each of which takes memory


class Column:
    """The values of a key, NaN for null, and the rows that have them."""

    def __init__(self) -> None:
        self.rows = array("i")
        self.values = array("d")


class Columns:
    """The records of a file, which is read in chunks: rows of numbers, and markers between them."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: named in errors.
        """
        self._path = path
        self._line = 0  # lines read
        self._torn: int | None = None  # number of the last line, if that is not a record
        self.steps = array("d")  # of all rows, exact up to 2**53
        self.by_key: dict[str, Column] = {}
        self.markers: list[tuple[int, Record]] = []  # each with the number of rows before it

    def read(self, chunk: bytes) -> None:
        """Add whole lines, or the last one of the file, which may be partial.

        Raises:
            DataError: a line before a line other than a start is not a record.
        """
        lines = chunk.removesuffix(b"\n")
        records = None if self._torn else _parse_together(lines)
        if records is not None and self._add(records):
            self._line += len(records)
            return
        self._add(self._parse_each(lines))
        if self._torn and lines == chunk:  # a kill has left it
            self._torn = None

    def end(self) -> None:
        """Raise a DataError if the last line of the file is whole, but not a record."""
        if self._torn:
            raise self._not_a_record()

    def _parse_each(self, lines: bytes) -> list[Record]:
        records = []
        for line in lines.split(b"\n"):
            self._line += 1
            record = parse(line)
            if self._torn and not (record and "start" in record):
                raise self._not_a_record()
            self._torn = None if record else self._line
            if record:
                records.append(record)
        return records

    def _not_a_record(self) -> DataError:
        return DataError(f"line {self._torn} of {self._path} is not a record; delete the line")

    def _add(self, records: list[Record]) -> bool:
        """Add records; return False, and add nothing, if one of them is none."""
        alike = defaultdict[tuple[str, ...], list[int]](list)  # indices, by keys
        for index, keys in enumerate(map(tuple, records)):
            alike[keys].append(index)
        numbers = {}
        are_rows = [True] * len(records)
        for keys, indices in alike.items():
            values = _numbers(keys, [records[index] for index in indices])
            if values is None:
                return False
            if MARKERS & {*keys}:
                for index in indices:
                    are_rows[index] = False
            else:
                numbers[keys] = values
        before = [*accumulate(are_rows, initial=len(self.steps))]  # rows before each record
        for keys, values in numbers.items():
            rows = array("i", [before[index] for index in alike[keys]])
            for offset, key in enumerate(keys):
                if key != "step":
                    column = self.by_key.setdefault(key, Column())
                    column.rows.extend(rows)
                    column.values.extend(array("d", values[offset :: len(keys)]))
        if len(self.by_key) > MAX_KEYS:
            raise DataError(f"{self._path} has more than {MAX_KEYS:,} different keys; remove some")
        for index, record in enumerate(records):
            if are_rows[index]:
                self.steps.append(record["step"])
            else:
                self.markers.append((before[index], record))
        return True


def _parse_together(lines: bytes) -> list[Record] | None:
    """Return the objects of lines, parsed as one array; None if a line may be something else.

    A brace opens at the start of each line and nowhere else, and as many objects come out as there
    are lines: so each line is one.
    """
    pieces = lines.split(b"\n{")
    count = len(pieces)
    if not (lines.startswith(b"{") and lines.count(b"{") == lines.count(b"\n") + 1 == count):
        return None
    try:
        records = from_json(b"[" + b",{".join(pieces) + b"]", allow_inf_nan=False)
    except ValueError:
        return None
    return records if {*map(type, records)} == {dict} and len(records) == count else None


def _numbers(keys: tuple[str, ...], records: list[Record]) -> list[float] | None:
    """Return the values of records with these keys, in turn; None if one is not a record."""
    values = [*chain.from_iterable(map(dict.values, records))]
    types = {*map(type, values)}
    if "step" not in keys or not types <= {int, float, type(None)}:
        return None
    if {*map(type, values[keys.index("step") :: len(keys)])} != {int}:
        return None
    finite = values
    if type(None) in types:
        finite = [value for value in values if value is not None]
        values = [math.nan if value is None else value for value in values]
    return values if min(finite) > -MAX_VALUE and max(finite) < MAX_VALUE else None


def parse(line: bytes) -> Record | None:
    """Return a record, i.e. an object with a step and numbers; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line, parse_constant=lambda _: None)
        if isinstance(record, dict) and _numbers(tuple(record), [record]) is not None:
            return record
    return None
