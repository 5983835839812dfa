"""The cores and the memory of this machine, and how many processes it can run; without torch."""

import contextlib
import os
import resource
import sys
from pathlib import Path

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.validation import check

CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of the container, or `max`
MAX_PROCESSES_PER_CORE = 16
MIN_RANK_BYTES = 1 << 27  # of a rank's own memory


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(cores())


def threads_per_worker(workers: int, on_cores: int | None = None) -> int:
    """Return the threads of each of several workers on so many cores, or all of this machine.

    OMP_NUM_THREADS takes precedence, if it is one number.
    """
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return max(1, (on_cores or count_cores()) // workers)


def canonical_threads(ddp: DDPConfig) -> int | None:
    """Return the threads of a rank whose bits must not depend on the machine; None: it may.

    OMP_NUM_THREADS, or one.
    """
    is_canonical = ddp.reduction == "canonical"
    return threads_per_worker(workers=1, on_cores=1) if is_canonical else None


def machine_memory() -> int:
    """Return the bytes of physical memory, or of the container's limit if that is smaller."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(CGROUP.read_text()))
    return min(limits)


def installed_memory() -> int:
    """Return the bytes that this process may use: `machine_memory`, or `ulimit -v` if less."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine_memory()
    return min(limit, machine_memory())


def check_machine(config: Config) -> None:
    """Refuse a configuration that starts more processes than this machine can run.

    Raises:
        ConfigError: names the key and the largest number.
    """
    workers = config.ddp.local_workers
    check_processes("ddp.nproc_per_node", workers, min_bytes=MIN_RANK_BYTES)
    check_processes("data.num_workers", getattr(config.data, "num_workers", 0), per=workers or 1)


def check_processes(key: str, number: int, per: int = 1, min_bytes: int = 0) -> None:
    """Refuse more processes than this machine can run, before any is started.

    Args:
        key: the key that sets `number`.
        per: how often that number is started.
        min_bytes: memory of each process.

    Raises:
        ConfigError: names the key and the largest number.
    """
    most = max(1, MAX_PROCESSES_PER_CORE * count_cores() // per)
    reason = f"{MAX_PROCESSES_PER_CORE} for each of the {count_cores()} cores of this machine"
    if min_bytes:
        fit_in_memory = max(1, machine_memory() // min_bytes)
        if fit_in_memory < most:
            most = fit_in_memory
            reason = f"for its {machine_memory() / 2**30:.1f} GiB of memory"
    check(number <= most, f"{key}={number} must be at most {most} here, {reason}")
