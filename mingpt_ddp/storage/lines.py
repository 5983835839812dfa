"""Append lines to a file, and read the lines of a file.

Writing and reading have the same limits, so that a file which was written can be read. Because
of the limits, reading takes little memory, whatever an untrusted file contains.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mingpt_ddp.storage.storage import open_regular
from mingpt_ddp.storage.yaml_and_json import check_size

MAX_LINE_BYTES = 1 << 22
# `read_lines` refuses a file with more lines than a file of the largest size could have if each
# line had this length. A run writes longer lines, so it never writes too many.
MIN_LINE_BYTES = 24


def append_line(path: Path, line: bytes, limit: int) -> None:
    """Append a line to a file: either the whole line, or nothing if there is an error.

    If the file ends with a partial line from a killed process, end that line first.

    Args:
        limit: Size in bytes above which `read_lines` refuses the file.

    Raises:
        OSError: The disk is full, or the file would become too large to be read.
    """
    check_size(line, MAX_LINE_BYTES)
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, 2)
        if end + len(line) >= limit:
            raise OSError(f"it is full: at most {limit:,} bytes can be read")
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

    Args:
        limit: Size limit of the file in bytes.

    Raises:
        OSError: The path is not a regular file, or the file exceeds a limit or cannot be read.
    """
    count = 0
    max_lines = limit // MIN_LINE_BYTES
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(f"{path} has more than {limit:,} bytes")
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise OSError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes")
            count += line.endswith(b"\n")
            if count > max_lines:
                raise OSError(f"{path} has more than {max_lines:,} lines; shorten it")
            yield line.removesuffix(b"\n")
