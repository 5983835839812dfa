"""What Linux alone has of processes: prctl, and what /proc says of one."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

STOPPED = "T"  # the state of a process after SIGSTOP
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
PR_SET_NAME = 15  # likewise


def die_with_parent() -> None:
    """Let the kernel send this process SIGKILL when its parent dies; nothing without Linux."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Name this process in ps and top; nothing without Linux."""
    _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument)


def read_boot_id() -> str:
    """Return an id of this machine that changes when it boots; "" without Linux's /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on: the state, the parent, ...

    Field n of proc(5) is at index n - 3.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def read_state(pid: int | None, parents: set[int | None] | None = None) -> str:
    """Return the state of a process; "" if it has ended, or without /proc.

    Args:
        parents: a process with another parent has taken over the id of one that has ended.
    """
    try:
        state, parent, *_ = read_stat(pid or 0)
    except (OSError, ValueError):
        return ""
    is_other = parents is not None and int(parent) not in parents
    return "" if is_other or state == "Z" else state  # Z: only its exit code is left


def kill_stopped_children(parent: int) -> None:
    """SIGKILL the stopped children of a process."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if read_state(pid, {parent}) == STOPPED:
            kill(pid)


def kill(pid: int) -> None:
    """SIGKILL a process, unless it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
