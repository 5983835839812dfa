"""Read columns of Parquet files with pyarrow, in batches of rows."""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

from mingpt_ddp.data.file_kinds import import_pyarrow
from mingpt_ddp.data.text.records import Table
from mingpt_ddp.errors import DataError

# Limits of a batch in memory: the number of rows, and roughly their bytes.
BATCH_ROWS = 1024
BATCH_BYTES = 1 << 24
BUFFER_BYTES = 1 << 20


def parquet_table(file: io.BufferedReader, where: str) -> Table:
    """Open a Parquet file as a table.

    Args:
        file: The open file.
        where: Name of the file in messages.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: The file is damaged, or it is not Parquet.
    """
    pa = import_pyarrow("data.format=parquet")
    from pyarrow.parquet import ParquetFile

    opened = partial(ParquetFile, file, buffer_size=BUFFER_BYTES, pre_buffer=False)
    damages = (pa.ArrowException, ValueError, OSError)
    try:
        schema = opened().schema_arrow
    except damages as error:
        raise DataError(
            f"{where} is not Parquet, or it is damaged or cut off: {error}; copy it again"
        ) from error
    strings = []
    others = {}
    for field in schema:
        if _holds_strings(pa.types, field.type):
            strings.append(field.name)
        else:
            others[field.name] = str(field.type)

    def batches(column: str) -> Iterator[Any]:
        # Reading a column as a dictionary saves memory if texts repeat. Otherwise a dictionary is
        # slow and large.
        rows, repeated = opened(), opened(read_dictionary=[column])
        for i in range(rows.num_row_groups):
            size, count = _size_of(rows.metadata.row_group(i), column)
            if size <= BATCH_BYTES:
                yield from repeated.iter_batches(BATCH_ROWS, [i], [column])
            else:
                batch_rows = min(BATCH_ROWS, max(1, count * BATCH_BYTES // size))
                yield from rows.iter_batches(batch_rows, [i], [column])

    def values(column: str) -> Iterator[tuple[int, str | None]]:
        row = 0
        try:
            for batch in batches(column):
                texts = batch.column(column)
                # Without this, pyarrow would trust that the file's offsets are valid, and that its
                # text is UTF-8.
                texts.validate(full=True)
                # Decode one text after the other: a dictionary may repeat a long text in many rows.
                for text in texts:
                    row += 1
                    yield row, text.as_py()
        except damages as error:
            raise DataError(
                f"{where} is damaged or cut off after row {row:,}: {error}; copy it again"
            ) from error

    return Table(strings, others, values)


def _size_of(group: Any, column: str) -> tuple[int, int]:
    """Read the decompressed size of a column in a row group, and the group's number of rows."""
    columns = map(group.column, range(group.num_columns))
    [size] = [each.total_uncompressed_size for each in columns if each.path_in_schema == column]
    return size, group.num_rows


def _holds_strings(types: Any, kind: Any) -> bool:
    """Return True if a column of this pyarrow type holds strings, perhaps in a dictionary."""
    if types.is_dictionary(kind):
        return _holds_strings(types, kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
