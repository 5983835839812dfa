"""The directory in which multiprocessing makes its sockets.

It is locked while its process lives. After SIGKILL it stays, until the next start deletes it.
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

LONGEST_TMPDIR = 60  # bytes; the path of a socket is 43 bytes longer and may have 103


def make_socket_directory() -> None:
    """Make the directory for the sockets of this process and those that it starts.

    It is in TMPDIR, or in /tmp if that is too long. Directories that killed processes have left
    there are deleted.
    """
    config = _config()
    if config.get("tempdir"):  # this process or its launcher has made one
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
    """Delete the directory, if this process or multiprocessing has made it."""
    if directory := _config().get("tempdir"):
        shutil.rmtree(directory, ignore_errors=True)


def _config() -> dict[str, Any]:
    current: Any = process.current_process()
    config: dict[str, Any] = current._config
    return config


def _lock(directory: str) -> bool:
    """Lock a new directory until this process ends. Return False if another start deletes it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # without locks in this file system, no other start can lock it and delete it
        pass
    return os.path.exists(directory)


def _delete_if_abandoned(path: Path) -> None:
    """Delete the directory of a process of this user that has ended."""
    # An OSError says that it is another user's, a link, or locked by a living process.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
        finally:
            os.close(descriptor)
