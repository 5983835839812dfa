"""The directory in which multiprocessing creates its sockets.

A process locks its directory as long as it lives. If SIGKILL ends the process, its directory is
left behind. The next process that creates such a directory deletes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from mingpt_ddp.process.linux import read_boot_id

# Longest path of TMPDIR in bytes. The path of a socket is 43 bytes longer, and may have 103 bytes.
LONGEST_TMPDIR = 60


def make_socket_directory() -> None:
    """Create the directory for the sockets of this process and of all processes that it starts.

    It is in TMPDIR, or in /tmp if the path of TMPDIR is too long. Directories that killed processes
    have left there are deleted.
    """
    config = _config()
    if config.get("tempdir"):  # this process or its launcher has created one
        return
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > LONGEST_TMPDIR:
        parent = "/tmp"
    # Other machines may share this directory. Their locks cannot be seen here.
    prefix = f"mingpt-{read_boot_id()[:8]}-"
    for path in Path(parent).glob(f"{prefix}*"):
        _delete_if_abandoned(path)
    directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
    while not _lock(directory):
        directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
    config["tempdir"] = directory  # multiprocessing reads this key
    util.Finalize(None, delete_socket_directory, exitpriority=-100)


def delete_socket_directory() -> None:
    """Delete the directory, if there is one."""
    if directory := _config().get("tempdir"):
        shutil.rmtree(directory, ignore_errors=True)


def _config() -> dict[str, Any]:
    current: Any = process.current_process()
    config: dict[str, Any] = current._config
    return config


def _lock(directory: str) -> bool:
    """Lock a new directory until this process ends. Return False if another process deletes it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        pass  # the file system has no locks, so no other process can lock and delete the directory
    return os.path.exists(directory)


def _delete_if_abandoned(path: Path) -> None:
    """Delete the directory of a process that has ended, if it belongs to this user."""
    # An OSError means that it belongs to another user, is a link, or is locked by a living process.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
        finally:
            os.close(descriptor)
