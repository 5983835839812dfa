"""The directory in which multiprocessing makes its sockets."""

import os
import tempfile
from multiprocessing import util

LONGEST_TMPDIR = 71  # bytes: the path of a socket is 32 longer, and has at most 103


def make_socket_directory() -> None:
    """Make the directory for the sockets of this process and those that it starts.

    It is in TMPDIR, or in /tmp if that is too long. `exit_process` deletes it; SIGKILL leaves it.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before
