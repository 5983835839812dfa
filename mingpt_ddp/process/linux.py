"""Process functions that only Linux has: prctl, and the state of processes in /proc."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

STOPPED = "T"  # state of a process after SIGSTOP
# Options of prctl, from <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def die_with_parent() -> None:
    """Let the kernel send this process SIGKILL when its parent dies. Only works on Linux."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Set the name of this process in ps and top. Only works on Linux."""
    _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument)


def read_boot_id() -> str:
    """Return an id of this machine that changes when it boots. Return "" without Linux's /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_stat(pid: int | str) -> list[str]:
    """Read the fields of /proc/<pid>/stat, beginning with the state and the parent.

    The first two fields are left out, so field n of proc(5) is at index n - 3.

    Raises:
        OSError: There is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def read_state(pid: int | None, parents: set[int | None] | None = None) -> str:
    """Return the state of a process. Return "" if it has ended, or if there is no /proc.

    Args:
        pid: Process id. None if the process has not been started.
        parents: Process ids of the possible parents. If the parent is another process, then the
            process has ended and a new one reuses its id. None accepts any parent.
    """
    try:
        state, parent, *_ = read_stat(pid or 0)
    except (OSError, ValueError):
        return ""
    is_new_process = parents is not None and int(parent) not in parents
    # State Z is a zombie: the process has ended, but its parent has not read its exit code.
    return "" if is_new_process or state == "Z" else state


def kill_stopped_children(parent: int) -> None:
    """Send SIGKILL to the stopped children of a process."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if read_state(pid, {parent}) == STOPPED:
            kill(pid)


def kill(pid: int) -> None:
    """Send SIGKILL to a process, unless it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
