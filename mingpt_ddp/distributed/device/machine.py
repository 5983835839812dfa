"""Find the cores and memory of this machine, and how many processes it can run, without torch."""

import contextlib
import os
import resource
import sys
from pathlib import Path

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.config.validation import check

# File with the memory limit of the container in bytes, or `max` if it has no limit.
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_PROCESSES_PER_CORE = 16
MIN_RANK_BYTES = 1 << 27  # memory that a rank needs at least and does not share


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cores())


def threads_per_worker(workers: int, n_cores: int | None = None) -> int:
    """Return the number of threads of each worker, so that together they fill the cores.

    OMP_NUM_THREADS takes precedence, if it is a single number.

    Args:
        workers: Number of workers that share the cores.
        n_cores: Number of cores. None for all cores that this process may use.
    """
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return max(1, (n_cores or count_cores()) // workers)


def canonical_threads(ddp: DDPConfig) -> int | None:
    """Return the number of threads of a rank with ddp.reduction=canonical.

    The bits of a canonical reduction must not depend on the machine. The number is therefore
    OMP_NUM_THREADS, or else 1. Return None without a canonical reduction.
    """
    is_canonical = ddp.reduction == "canonical"
    return threads_per_worker(workers=1, n_cores=1) if is_canonical else None


def machine_memory() -> int:
    """Return the size in bytes of the physical memory, or the container's limit if smaller."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(CGROUP_LIMIT.read_text()))
    return min(limits)


def usable_memory() -> int:
    """Return the memory in bytes that this process may use.

    This is `machine_memory`, or the limit of `ulimit -v` if that is smaller.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine_memory()
    return min(limit, machine_memory())


def check_machine(config: Config) -> None:
    """Refuse a configuration that starts more processes than this machine can run.

    Raises:
        ConfigError: There would be too many processes. The message names the key and the largest
            possible number.
    """
    workers = config.ddp.local_workers
    check_processes("ddp.nproc_per_node", workers, min_bytes=MIN_RANK_BYTES)
    loaders = getattr(config.data, "num_workers", 0)
    check_processes("data.num_workers", loaders, n_parents=workers or 1)


def check_processes(key: str, number: int, n_parents: int = 1, min_bytes: int = 0) -> None:
    """Refuse more processes than this machine can run, before any is started.

    Args:
        key: The key that sets `number`.
        number: Value of that key.
        n_parents: Number of processes that start `number` processes each.
        min_bytes: Memory that each process needs.

    Raises:
        ConfigError: There would be too many processes. The message names the key and the largest
            possible number.
    """
    most = max(1, MAX_PROCESSES_PER_CORE * count_cores() // n_parents)
    reason = f"{MAX_PROCESSES_PER_CORE} for each of the {count_cores()} cores of this machine"
    if min_bytes:
        fit_in_memory = max(1, machine_memory() // min_bytes)
        if fit_in_memory < most:
            most = fit_in_memory
            reason = f"for its {machine_memory() / 2**30:.1f} GiB of memory"
    check(number <= most, f"{key}={number} must be at most {most} here, {reason}")
