"""Append to files of lines, and read them, within the same limits.

Reading takes bounded memory, whatever a file contains.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mingpt_ddp.storage.storage import open_regular
from mingpt_ddp.storage.yaml_and_json import check_size

MAX_LINE_BYTES = 1 << 22
MIN_LINE_BYTES = 24  # smallest average length of a line; a run writes longer lines


def append_line(path: Path, line: bytes, limit: int) -> None:
    """Append the whole line or nothing. First end a partial line of a killed process.

    Args:
        limit: Largest size in bytes at which the file can be read.

    Raises:
        OSError: The disk is full, or the file would become too large to be read.
    """
    check_size(line, MAX_LINE_BYTES)
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, 2)
        if end + len(line) >= limit:
            raise OSError(f"it is full: no more than {limit:,} bytes would be read")
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"\n", b""):
            line = b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError:
            file.truncate(end)
            raise


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the lines of a file. The last line may be partial.

    Raises:
        OSError: The file is not a regular file, exceeds a limit or cannot be read.
    """
    count = 0  # number of whole lines
    most = limit // MIN_LINE_BYTES
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(f"{path} has more than {limit:,} bytes")
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise OSError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes")
            count += line.endswith(b"\n")
            if count > most:
                raise OSError(f"{path} has more than {most:,} lines; shorten it")
            yield line.removesuffix(b"\n")
