"""The directory in which multiprocessing makes its sockets."""

import os
import shutil
import tempfile
from multiprocessing import process, util
from typing import Any

LONGEST_TMPDIR = 71  # bytes: the path of a socket is 32 longer, and has at most 103


def make_socket_directory() -> None:
    """Make the directory for the sockets of this process and those that it starts.

    It is in TMPDIR, or in /tmp if that is too long. SIGKILL leaves it.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def delete_socket_directory() -> None:
    """Delete the directory, if this process or multiprocessing has made it."""
    current: Any = process.current_process()
    if directory := current._config.get("tempdir"):
        shutil.rmtree(directory, ignore_errors=True)
