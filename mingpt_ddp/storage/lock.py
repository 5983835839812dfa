"""Lock a local directory: flock a file in it. The lock ends with the process."""

import contextlib
import fcntl
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.storage.lease import LockedError
from mingpt_ddp.storage.storage import open_regular

log = logging.getLogger(__name__)

LOCK = ".lock"
# Wait this long for a lock, because killed processes of the same run take a moment to exit.
LOCK_WAIT_S = 10.0
POLL_S = 0.1
LONG_WAIT_S = 5.0  # after this time, `log_if_long` logs its line


def acquire_lock(
    directory: Path,
    wait_s: float = LOCK_WAIT_S,
    *,
    what: str = "the run directory",
    key: str = "run.root",
) -> IO[str]:
    """Create a directory if it does not exist, and lock it with flock.

    Return the open lock file. The lock ends when the file is closed, or with the process.

    Args:
        wait_s: Time to wait for another process to unlock the directory.
        what: Name of the directory in error messages.
        key: The setting that chooses another directory, for error messages.

    Raises:
        RunError: Another process has locked the directory, or it is not writable.
    """
    try:
        lock = open_lock(directory, lambda file: _wait_for(file, directory, wait_s))
    except OSError as error:
        raise RunError(
            f"cannot write to {what} {directory}: {reason(error)}; choose another {key}"
        ) from error
    with contextlib.suppress(OSError):  # if the disk is full, a later write reports it
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def _wait_for(file: IO[str], directory: Path, wait_s: float) -> None:
    """Wait for a lock. Raise LockedError if another process still holds it after `wait_s`."""
    deadline = time.monotonic() + wait_s
    for attempt in itertools.count():
        try:
            lock_now(file)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise LockedError(directory, owner) from error
            if attempt == 10:
                log.info("waiting up to %.0f s for another process to unlock %s", wait_s, directory)
            time.sleep(POLL_S)


def open_lock(directory: Path, lock: Callable[[IO[str]], None]) -> IO[str]:
    """Create a directory if it does not exist, open its lock file, and lock the file.

    If the file was deleted before it was locked, start again. Other processes would lock the file
    that replaces it.

    Args:
        lock: Locks the open file, or raises an exception.

    Raises:
        OSError: The lock file cannot be opened.
    """
    # O_NOFOLLOW: a symbolic link could lead to any file.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        file: IO[str] = open_regular(directory / LOCK, flags, "a+")
        lock(file)
        if is_lock_of(directory, file):
            return file
        file.close()


def lock_now(file: IO[str]) -> None:
    """Lock a file without waiting.

    Raises:
        OSError: Another process has locked the file, or the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def log_if_long(line: str) -> Iterator[None]:
    """Log a line if the body of the with statement takes longer than LONG_WAIT_S."""
    timer = threading.Timer(LONG_WAIT_S, log.info, ["%s", line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_lock_of(directory: Path, lock: IO[str]) -> bool:
    """Return True if an open file is still the lock file in the directory.

    If not, another process has deleted or replaced the file, and the lock protects nothing.
    """
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LOCK))
    return False
