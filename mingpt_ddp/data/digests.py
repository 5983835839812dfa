"""Hash JSON values, and read the sizes and times of files to notice changes."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest_of(values: Any) -> str:
    """Compute the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def status_of(files: Iterable[Path]) -> list[list[Any]]:
    """Read the path, size, modification time, change time and inode of each file.

    Any write to a file changes its times, unless it follows the previous write within a tick of
    the file system's clock. The device number is left out, because it may change with each mount.
    """
    status = []
    for path in files:
        info = path.stat()
        name = os.path.abspath(path)
        status.append([name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino])
    return status
