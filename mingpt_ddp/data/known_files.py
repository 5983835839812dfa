"""What earlier starts have found by reading files, kept for as long as the files are the same.

A file is the same if its size, modification time, change time and inode are. Nothing is kept of a
file that was written just before it was read: it could be written again within the same tick of its
file system's clock.
"""

import contextlib
import hashlib
import json
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field

from mingpt_ddp.config.validation import build
from mingpt_ddp.errors import UserError
from mingpt_ddp.storage.storage import atomic_write, read_regular

T = TypeVar("T")
Sha256: TypeAlias = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RECORDS = "files.json"
MAX_RECORDS = 10_000  # the newest are kept
MAX_BYTES = 1 << 26  # of all of them
SETTLED_NS = 2_000_000_000  # the longest tick of a clock, that of FAT
MARGIN_NS = 10_000_000  # of a sleep, whose seconds are rounded
SMALL_BYTES = 1 << 18  # files that are read as fast as they are looked up
# What untrusted JSON of another shape raises.
INVALID = (ValueError, TypeError, LookupError, AttributeError, RecursionError, UserError)


@dataclass(frozen=True)
class Hash:
    """What is found in a file of which nothing else is asked."""

    sha256: Sha256


def file_status(files: Iterable[Path]) -> list[Any] | None:
    """Return what a write to one of the files changes.

    None: a write need not change it, or they are small, or one is no regular file.
    """
    status = []
    size = 0
    newest = 0
    for path in files:
        try:
            attributes = path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(attributes.st_mode):
            return None
        times = (attributes.st_mtime_ns, attributes.st_ctime_ns)
        # no device: its number may be another one after each mount
        status.append([attributes.st_size, *times, attributes.st_ino])
        size += attributes.st_size
        newest = max(newest, *times)
    if size < SMALL_BYTES or newest > time.time_ns() - SETTLED_NS:
        return None
    return status


def settle(path: Path) -> None:
    """Wait until a file that has just been written is recorded once it is read."""
    age_ns = time.time_ns() - path.stat().st_ctime_ns
    time.sleep(max(0, SETTLED_NS + MARGIN_NS - age_ns) / 1e9)


class FileRecords:
    """Values that were found by reading, in one file of JSON."""

    def __init__(self, path: Path, uses: bool) -> None:
        """
        Args:
            uses: the records of earlier starts, if they are valid.
        """
        self._path = path
        self._known: dict[str, Any] | None = None if uses else {}
        self.new: dict[str, Any] = {}  # to be written

    def find(self, key: Any, state: Any, kind: type[T]) -> T | None:
        """Return what was found by reading in the same state; None: there is no valid record.

        Args:
            key: JSON values that name what is read, and how.
            state: JSON values that change with what is read, as `file_status` returns; None:
                unknown.
            kind: the dataclass of what was found, of JSON values.
        """
        if state is None:
            return None
        if self._known is None:
            self._known = self._load()
        with contextlib.suppress(*INVALID):
            recorded, value = self._known[digest_of(key)]
            if recorded == digest_of(state):
                return build(kind, value, "")
        return None

    def add(self, key: Any, before: Any, after: Any, values: Any) -> None:
        """Keep what was found by reading, unless the state before or after it is another one.

        Args:
            values: a dataclass of JSON values.
        """
        if before is not None and before == after:
            self.new[digest_of(key)] = [digest_of(after), asdict(values)]

    def _load(self) -> dict[str, Any]:
        """Return the records by key; {} if they are damaged."""
        with contextlib.suppress(OSError, *INVALID):
            records, digest = json.loads(read_regular(self._path, MAX_BYTES)).values()
            if isinstance(records, dict) and digest_of(records) == digest:
                return records
        return {}

    def write(self) -> None:
        """Add what is new to the file, which the caller has locked.

        Raises:
            OSError: it cannot be written.
        """
        old = {key: record for key, record in self._load().items() if key not in self.new}
        records = dict([*old.items(), *self.new.items()][-MAX_RECORDS:])
        content = {"files": records, "digest": digest_of(records)}
        atomic_write(self._path, json.dumps(content).encode())
        self.new.clear()

    def forget(self) -> None:
        """Delete all records: one was wrong."""
        self._path.unlink(missing_ok=True)


def digest_of(values: Any) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
