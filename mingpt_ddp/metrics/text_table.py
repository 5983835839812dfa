"""Lay out text in columns."""

from collections.abc import Container, Sequence


def table_lines(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Format a table. Return a line for each row, with columns as wide as their longest cells.

    Args:
        left: Numbers of the columns that are aligned to the left, from 0.
    """
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(len(cell) for cell in column)
        align = str.ljust if number in left else str.rjust
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
