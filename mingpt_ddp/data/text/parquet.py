"""Columns of Parquet and Arrow files by pyarrow, in batches of rows."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mingpt_ddp.data.text.archives import import_pyarrow
from mingpt_ddp.data.text.json_and_csv import Table
from mingpt_ddp.errors import DataError

# The most rows of Parquet, and about the most bytes of them, that are in memory together.
BATCH_ROWS = 1024
BATCH_BYTES = 1 << 24
BUFFER_BYTES = 1 << 20
STREAM = b"\xff\xff\xff\xff"  # before each message


def column_table(file: io.BufferedReader, where: str) -> Table:
    """Return the rows of a Parquet file, an Arrow file (Feather) or an Arrow stream.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged.
    """
    pa = import_pyarrow("data.format=parquet")
    damages = (pa.ArrowException, ValueError, OSError)
    try:
        schema, batches = _open(pa, file, where)
    except damages as error:
        raise DataError(f"{where} is damaged or cut off: {error}") from error
    strings = []
    others = {}
    for field in schema:
        if _holds_strings(pa.types, field.type):
            strings.append(field.name)
        else:
            others[field.name] = str(field.type)

    def values(column: str) -> Iterator[str | None]:
        row = 0
        try:
            for batch in batches(column):
                texts = batch.column(column)
                texts.validate(full=True)  # pyarrow trusts offsets, and that text is UTF-8
                for text in texts:  # one at a time: a dictionary may have each text once
                    yield text.as_py()
                row += len(texts)
        except damages as error:
            raise DataError(f"{where} is damaged or cut off after row {row:,}: {error}") from error

    return Table(strings, others, values)


def _open(pa: Any, file: Any, where: str) -> tuple[Any, Callable[[str], Iterator[Any]]]:
    """Return the schema of a file, and what iterates over batches with a column."""
    head = file.peek(8)[:8]
    if head.startswith(b"PAR1"):
        from pyarrow.parquet import ParquetFile

        parquet = partial(ParquetFile, file, buffer_size=BUFFER_BYTES, pre_buffer=False)

        def batches(column: str) -> Iterator[Any]:
            # A dictionary is smaller than its texts, but slow and large if no text is repeated.
            rows, repeated = parquet(), parquet(read_dictionary=[column])
            for i in range(rows.num_row_groups):
                size, count = _size_of(rows.metadata.row_group(i), column)
                if size <= BATCH_BYTES:
                    yield from repeated.iter_batches(BATCH_ROWS, [i], [column])
                else:
                    batch_rows = min(BATCH_ROWS, max(1, count * BATCH_BYTES // size))
                    yield from rows.iter_batches(batch_rows, [i], [column])

        return parquet().schema_arrow, batches
    if head.startswith(b"FEA1"):
        raise DataError(f"{where} is of Feather's first version; write it as Parquet")
    if head.startswith(b"ARROW1"):
        arrow = pa.ipc.open_file(file)
        return arrow.schema, lambda _: map(arrow.get_batch, range(arrow.num_record_batches))
    if not head.startswith(STREAM):
        raise DataError(f"{where} is neither Parquet nor Arrow")
    stream = pa.ipc.open_stream(file)
    return stream.schema, lambda _: iter(stream)


def _size_of(group: Any, column: str) -> tuple[int, int]:
    """Return the bytes of a column in a row group, decompressed, and the rows of the group."""
    columns = map(group.column, range(group.num_columns))
    [size] = [each.total_uncompressed_size for each in columns if each.path_in_schema == column]
    return size, group.num_rows


def _holds_strings(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        return _holds_strings(types, kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
