"""Files of lines that a run appends to: written and read within the same limits.

They are read in bounded memory, whatever is in them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mingpt_ddp.storage.storage import open_regular
from mingpt_ddp.storage.yaml_and_json import check_size

MAX_LINE_BYTES = 1 << 22
MIN_LINE_BYTES = 24  # on average: those of a run are longer


def append_line(path: Path, line: bytes, limit: int) -> None:
    """Append the whole line or nothing; first terminate a partial line of a killed process.

    Args:
        limit: bytes of the file that are read.

    Raises:
        OSError: the disk is full, or the file could not be read with this line.
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
    """Yield the lines of a file, the last one of which may be partial.

    Raises:
        OSError: it is not a regular file, exceeds a limit or cannot be read.
    """
    count = 0  # of whole lines
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
