"""Inject faults of the machine that a run uses: its disk and its clock."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

DISK_BYTES = 2 << 30  # the file is sparse
CLOSING_S = 20.0
CLOCK = """
import time
_path = {path!r}
_time, _time_ns = time.time, time.time_ns
def _offset():
    try:
        with open(_path) as file:
            return int(file.read() or 0)
    except OSError:
        return 0
time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + _offset() * 10**9
"""


class Disk:
    """An ext4 file system in a file, mounted on a directory.

    It stays mounted and keeps its files when this process is killed.
    """

    def __init__(self, image: Path, path: Path) -> None:
        self.image, self.path = image, path
        self._ballast = path / "ballast"

    def mount(self) -> bool:
        """Mount the disk, writable and with free space. Return False if this user may not do so."""
        self.path.mkdir(exist_ok=True)
        if not self.path.is_mount():
            if not self.image.exists() and not self._make():
                return False
            if not _succeeds("mount", "-o", "loop", str(self.image), str(self.path)):
                return False
        self.set_writable(True)
        self.free()
        return True

    def _make(self) -> bool:
        with open(self.image, "wb") as file:
            file.truncate(DISK_BYTES)
        if _succeeds("mkfs.ext4", "-q", "-m", "0", str(self.image)):
            return True
        self.image.unlink()
        return False

    def unmount(self) -> None:
        if self.path.is_mount():
            _retry("umount", str(self.path))

    def set_writable(self, is_writable: bool) -> None:
        """Remount the disk. To make it read-only, no file on it may be open for writing."""
        option = f"remount,{'rw' if is_writable else 'ro'}"
        _retry("mount", "-o", option, str(self.path))

    def fill(self) -> None:
        """Write a file that takes all the free space."""
        with open(self._ballast, "ab") as file:
            end, size = 0, DISK_BYTES
            while size >= 1024:
                try:
                    os.posix_fallocate(file.fileno(), end, size)
                    end += size
                except OSError:
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


def _retry(*command: str) -> None:
    """Repeat a command until it succeeds.

    It fails while the threads of a killed process have not closed their files yet.
    """
    end = time.monotonic() + CLOSING_S
    while not _succeeds(*command):
        if time.monotonic() > end:
            subprocess.run(command, check=True)
        time.sleep(0.05)


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Clock:
    """A clock for the processes of a run that can jump at any moment: it replaces `time.time`.

    Other time stamps do not jump: those of files, and those with which botocore signs requests.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def source(self) -> str:
        """Return code for a sitecustomize module, which replaces the clock of a process."""
        return CLOCK.format(path=str(self._path))

    def set(self, offset_s: int) -> None:
        """Set the clock of all processes to this many seconds after the right time."""
        new = self._path.with_suffix(".new")
        new.write_text(str(offset_s))
        os.replace(new, self._path)
