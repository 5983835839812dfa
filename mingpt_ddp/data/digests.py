"""Digests of JSON values, and what the file system says about files."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest_of(values: Any) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def status_of(files: Iterable[Path]) -> list[list[Any]]:
    """Return the path, size, modification time, change time and inode of each file.

    A write to a file changes them, if the clock of its file system has moved on since the last
    write. The number of the device is left out, because it may change with each mount.
    """
    status = []
    for path in files:
        at = path.stat()
        name = os.path.abspath(path)
        status.append([name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino])
    return status
