"""Read from the environment which rank this process has, and who has started it.

Only this module reads RANK, WORLD_SIZE, MASTER_ADDR, OMPI_COMM_WORLD_RANK and similar variables.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.process.linux import read_stat

T = TypeVar("T")
# The launcher of `ddp.nproc_per_node` sets this for its workers: time.monotonic() at their start.
STARTED_AT = "MINGPT_DDP_STARTED_AT"
# Set if standard error can show a progress line although it is not a terminal, as in a notebook:
# after a carriage return, the next text overwrites the line.
SHOWS_PROGRESS = "MINGPT_DDP_SHOWS_PROGRESS"
# `mingpt_ddp.train` and `sweep` set this for the process that they start: a Caller as JSON.
CALLER = "MINGPT_DDP_CALLER"


@dataclass(frozen=True)
class Caller:
    """The process that has started this process from Python."""

    pid: int  # process id of the caller; if the caller dies, this process exits
    outcome_file: str | None = None  # this process writes its outcome to this file, as JSON
    job_file: str | None = None  # file with the job as JSON; None if the command line names it

    def environ(self) -> dict[str, str]:
        """Return the environment variable that tells a new process about its caller."""
        return {CALLER: json.dumps(asdict(self))}


@functools.cache
def take_caller() -> Caller | None:
    """Return the caller of this process, if it has one. Hide it from processes started later."""
    text = os.environ.pop(CALLER, None)
    return None if text is None else Caller(**json.loads(text))


@dataclass(frozen=True)
class DistEnv:
    """The global and local rank of this process, and how it was started."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # True if the parent process hosts the job's key-value store, and restarts this process when
    # this process dies.
    has_agent: bool = False
    master_address: tuple[str, int] = ("", 0)  # host and port of the job's key-value store
    is_standalone: bool = True  # True if no launcher has set RANK and WORLD_SIZE
    # True if LOCAL_RANK is set. Then the launcher starts one process for each local rank.
    has_local_rank: bool = False

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def call_on_rank_zero(self, fn: Callable[[], T]) -> T | None:
        """Call `fn` only on rank zero, and return None on other ranks. No rank communicates."""
        return fn() if self.is_rank_zero else None


def read_env(workers_per_pod: int = 1) -> DistEnv:
    """Read the rank of this process from the environment variables that its launcher has set.

    The launcher may be torchrun, mpirun of Open MPI, Kubeflow's operator, or a launcher of the user
    that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        workers_per_pod: Number of workers in each Kubeflow pod. The variables of a pod only give
            the number of the pod.

    Raises:
        ConfigError: Some variables are missing or inconsistent.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return _read_mpi_env() or _read_pod_env(workers_per_pod)
    needed = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") and _read_int("WORLD_SIZE") > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set; set all of {', '.join(needed)}, or none of them")
    env = DistEnv(
        rank=_read_int("RANK"),
        local_rank=_read_int("LOCAL_RANK", "0"),
        world_size=_read_int("WORLD_SIZE"),
        has_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        master_address=(os.environ.get("MASTER_ADDR", ""), _read_int("MASTER_PORT", "0")),
        is_standalone=False,
        has_local_rank="LOCAL_RANK" in os.environ,
    )
    return _checked(env)


def _checked(env: DistEnv) -> DistEnv:
    if not 0 <= env.master_address[1] < 1 << 16:
        raise ConfigError(f"MASTER_PORT={env.master_address[1]} must lie below 65536")
    if not 0 <= env.rank < env.world_size:
        raise ConfigError(f"RANK={env.rank} must lie in 0 .. WORLD_SIZE - 1 = {env.world_size - 1}")
    return env


def _read_mpi_env() -> DistEnv | None:
    """Read the variables that mpirun of Open MPI sets. Return None if they are not set.

    MASTER_ADDR and MASTER_PORT name the host of the store. If all ranks are on this machine, they
    are optional.
    """
    if _read_int("OMPI_COMM_WORLD_SIZE", "1") == 1:
        return None
    world_size = _read_int("OMPI_COMM_WORLD_SIZE")
    is_one_machine = _read_int("OMPI_COMM_WORLD_LOCAL_SIZE", "0") == world_size
    host = os.environ.get("MASTER_ADDR", "localhost" if is_one_machine else "")
    if not host:
        raise ConfigError(
            "mpirun starts ranks on several machines, which need the address of rank 0; "
            "pass -x MASTER_ADDR=HOST"
        )
    env = DistEnv(
        rank=_read_int("OMPI_COMM_WORLD_RANK"),
        local_rank=_read_int("OMPI_COMM_WORLD_LOCAL_RANK"),
        world_size=world_size,
        master_address=(host, _read_int("MASTER_PORT", "29500")),
        is_standalone=False,
        has_local_rank=True,
    )
    return _checked(env)


def _read_pod_env(workers: int) -> DistEnv:
    """Read the variables that Kubeflow's operator sets for torchrun in each pod.

    If there is only one pod, its workers are standalone.
    """
    if "PET_NODE_RANK" not in os.environ or _read_int("PET_NNODES", "1") == 1:
        return DistEnv()
    return DistEnv(
        rank=_read_int("PET_NODE_RANK") * workers,
        world_size=_read_int("PET_NNODES") * workers,
        master_address=(os.environ.get("PET_MASTER_ADDR", ""), _read_int("PET_MASTER_PORT")),
        is_standalone=False,
    )


def has_parent_launcher() -> bool:
    """Return True if torchrun or the launcher of `ddp.nproc_per_node` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _read_int(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


def worker_environ(first: DistEnv, index: int, local_world_size: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a worker.

    Args:
        first: Rank, world size and store of the first worker on this node.
        index: Number of the worker on this node, counted from 0.
        local_world_size: Number of workers on this node.
    """
    variables = {
        "RANK": first.rank + index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": first.world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": first.master_address[0],
        "MASTER_PORT": first.master_address[1],
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": first.has_agent,
    }
    return {name: str(value) for name, value in variables.items()}


def process_start_time() -> float:
    """Return the time.monotonic() at which this process was started.

    For a worker of `ddp.nproc_per_node`, return the time at which the launcher began to start the
    workers, also after a failure. Without the /proc of Linux, return the current time.
    """
    if STARTED_AT in os.environ:
        return float(os.environ[STARTED_AT])
    try:
        started_s = int(read_stat("self")[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        age_s = 0.0
    return time.monotonic() - max(0.0, age_s)
