"""Tables of text in aligned columns."""

from __future__ import annotations

from mingpt_ddp.metrics.text_table import table_lines


def test_columns_are_as_wide_as_their_longest_cells():
    rows = [["step", "status", "job"], ["12345", "whole", "a"], ["1", "", "long"]]
    assert table_lines(rows, left=(1, 2)) == [
        " step  status  job",
        "12345  whole   a",
        "    1          long",
    ]
