"""The memory of a training process on a CPU: how much there is, and how the C library manages it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST = 32 << 20  # bytes: for what is larger glibc always asks the kernel
KEPT = 1 << 30  # bytes
CGROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may use, or `max`


def installed_memory() -> int:
    """Bytes that this process may use at most: of the machine, of its container, of `ulimit -v`."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(CGROUP.read_text()))
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def keep_freed_memory() -> None:
    """Have freed memory stay with the process for its next step.

    By default glibc gives it back to the kernel, which has to clear each page when the next step asks for it again: on
    a CPU up to a quarter of the time of a small model's step. Other C libraries, and a user's own MALLOC_ settings, are
    left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, KEPT)
