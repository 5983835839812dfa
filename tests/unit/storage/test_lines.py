"""Files of lines are read in bounded memory, with the same limits as for writing."""

from __future__ import annotations

import tracemalloc

import pytest

from mingpt_ddp.storage import lines
from mingpt_ddp.storage.lines import append_line, read_lines

LIMIT = 1 << 28


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


@pytest.mark.parametrize("content", ["", "\n", "a", "a\n", "a\n\nbc", "\n\nab\n"])
def test_the_last_line_may_lack_its_line_feed(path, content):
    path.write_text(content)
    expected = content.removesuffix("\n").split("\n") if content else []
    assert [line.decode() for line in read_lines(path, LIMIT)] == expected


LINE = b"0123456789" * 2 + b"012"


def test_a_file_of_the_largest_size_for_writing_can_be_read(path):
    limit = 100
    with pytest.raises(OSError, match=r"it is full: at most 100 bytes"):
        for _ in range(100):
            append_line(path, LINE + b"\n", limit)
    assert path.stat().st_size == 96
    assert [*read_lines(path, limit)] == [LINE] * 4
    with open(path, "ab") as file:
        file.write(b"01234")
    with pytest.raises(OSError, match="more than 100 bytes"):
        [*read_lines(path, limit)]


def test_a_line_of_the_largest_length_for_writing_can_be_read(path):
    longest = lines.MAX_LINE_BYTES
    append_line(path, b"x" * (longest - 1) + b"\n", LIMIT)
    assert [len(line) for line in read_lines(path, LIMIT)] == [longest - 1]
    with pytest.raises(OSError, match=r"it has 4,194,305 bytes"):
        append_line(path, b"x" * longest + b"\n", LIMIT)
    assert path.stat().st_size == longest


def test_one_endless_line_takes_little_memory(path):
    with open(path, "wb") as file:
        file.truncate(99_000_000)
    tracemalloc.start()
    with pytest.raises(OSError, match=r"a line of more than 4,194,304 bytes"):
        [*read_lines(path, LIMIT)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000


def test_the_number_of_lines_is_limited(path):
    path.write_bytes(b"\n" * 3)
    assert len([*read_lines(path, 3 * lines.MIN_LINE_BYTES)]) == 3
    with pytest.raises(OSError, match="more than 2 lines; shorten it"):
        [*read_lines(path, 3 * lines.MIN_LINE_BYTES - 1)]
