"""Text in columns."""

from __future__ import annotations

from mingpt_ddp.metrics.text_table import columns, table_lines


def test_columns_are_as_wide_as_their_longest_cells():
    rows = [["step", "status", "job"], ["12345", "whole", "a"], ["1", "", "long"]]
    assert table_lines(rows, left=(1, 2)) == [
        " step  status  job",
        "12345  whole   a",
        "    1          long",
    ]


def test_a_line_of_given_widths():
    """A cell that is longer than its column, and fewer cells than widths."""
    assert columns(["sum", "8", "2.5"], (-5, 3, 6)) == "sum      8     2.5"
    assert columns(["sum", "123456", "none"], (-5, 3, 6)) == "sum    123456    none"
    assert columns(["sum", "8"], (-5, 3, 6)) == "sum      8"
