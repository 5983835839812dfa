"""Files of lines: read in bounded memory, forwards and backwards, within the limits of writing."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from mingpt_ddp.storage import lines
from mingpt_ddp.storage.lines import append_line, read_backwards, read_lines

LIMIT = 1 << 28


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_both_directions(path, chunk, monkeypatch):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    monkeypatch.setattr(lines, "BACKWARD_CHUNK", chunk)
    draw = random.Random(chunk)
    for _ in range(50):
        content = bytes(draw.choices(b"ab\n", k=draw.randrange(100)))
        path.write_bytes(content)
        *whole, last = content.split(b"\n")
        assert [*read_lines(path, LIMIT)] == whole + [last] * (last != b"")
        assert [*read_backwards(path)] == [*whole, last][::-1]


LINE = b"0123456789" * 2 + b"012"


def test_a_file_is_read_up_to_what_was_written(path):
    limit = 100
    with pytest.raises(OSError, match=r"it is full: no more than 100 bytes"):
        for _ in range(100):
            append_line(path, LINE + b"\n", limit)
    assert path.stat().st_size == 96
    assert [*read_lines(path, limit)] == [LINE] * 4
    with open(path, "ab") as file:
        file.write(b"01234")
    with pytest.raises(OSError, match="more than 100 bytes"):
        [*read_lines(path, limit)]


def test_a_line_is_read_up_to_what_was_written(path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    append_line(path, b"x" * ((1 << 20) - 1) + b"\n", LIMIT)
    assert [len(line) for line in read_lines(path, LIMIT)] == [(1 << 20) - 1]
    assert [len(line) for line in read_backwards(path)] == [0, (1 << 20) - 1]
    with pytest.raises(OSError, match=r"it has 1,048,577 bytes"):
        append_line(path, b"x" * (1 << 20) + b"\n", LIMIT)
    assert path.stat().st_size == 1 << 20


@pytest.mark.parametrize("read", [lambda path: read_lines(path, LIMIT), read_backwards])
def test_one_endless_line_takes_little_memory(path, read):
    with open(path, "wb") as file:
        file.truncate(99_000_000)
    tracemalloc.start()
    with pytest.raises(OSError, match=r"a line of more than 4,194,304 bytes"):
        [*read(path)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000


def test_the_number_of_lines_is_limited(path):
    path.write_bytes(b"\n" * 3)
    assert len([*read_lines(path, 3 * lines.MIN_LINE_BYTES)]) == 3
    with pytest.raises(OSError, match="more than 2 lines; shorten it"):
        [*read_lines(path, 3 * lines.MIN_LINE_BYTES - 1)]
