"""Text in columns. Without rich, which takes a tenth of a second to import."""

from collections.abc import Container, Sequence


def columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line with cells of these widths, two spaces apart.

    Args:
        cells: at most one for each width.
        widths: in characters; a negative one aligns its cell to the left.
    """
    padded = []
    for cell, width in zip(cells, widths, strict=False):
        padded.append(cell.rjust(width) if width > 0 else cell.ljust(-width))
    return "  ".join(padded).rstrip()


def table_lines(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return a line for each row, with columns as wide as their longest cells.

    Args:
        left: the numbers of the columns that are aligned to the left.
    """
    widths = []
    for number, column in enumerate(zip(*rows, strict=True)):
        longest = max(len(cell) for cell in column)
        widths.append(-longest if number in left else longest)
    return [columns(row, widths) for row in rows]
