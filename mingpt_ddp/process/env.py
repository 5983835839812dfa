"""The ranks of this process.

The only module that reads RANK, WORLD_SIZE, MASTER_ADDR, OMPI_COMM_WORLD_RANK etc.
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
STARTED_AT = "MINGPT_DDP_STARTED_AT"  # set for the workers of `ddp.nproc_per_node`
# Set if standard error is shown where a carriage return begins the line again, as in a notebook.
SHOWS_PROGRESS = "MINGPT_DDP_SHOWS_PROGRESS"
CALLER = "MINGPT_DDP_CALLER"  # set by `mingpt_ddp.train` and `sweep`: a Caller as JSON


@dataclass(frozen=True)
class Caller:
    """The process that has started this one from Python."""

    pid: int  # this process ends with it
    outcome: str | None = None  # file to which this process writes how it has ended, as JSON
    job: str | None = None  # file with the job as JSON; None: the command line has the words

    def environ(self) -> dict[str, str]:
        """Return the environment variable that tells another process of its caller."""
        return {CALLER: json.dumps(asdict(self))}


@functools.cache
def take_caller() -> Caller | None:
    """Return the caller of this process, and hide it from the processes that this one starts."""
    text = os.environ.pop(CALLER, None)
    return None if text is None else Caller(**json.loads(text))


@dataclass(frozen=True)
class DistEnv:
    """The ranks of this process, and how it was started."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    has_agent: bool = False  # the parent hosts the store and restarts this process when it dies
    master_address: tuple[str, int] = ("", 0)  # host and port of the job's key-value store
    is_standalone: bool = True  # RANK and WORLD_SIZE are not set
    has_local_rank: bool = False  # LOCAL_RANK is set: one process per local rank

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def call_on_rank_zero(self, fn: Callable[[], T]) -> T | None:
        """Call `fn` on rank zero alone, without communication; return None on every other rank."""
        return fn() if self.is_rank_zero else None


def read_env(per_pod: int = 1) -> DistEnv:
    """Read RANK etc., as torchrun or the user's launcher sets them, or a Kubeflow pod's variables.

    Args:
        per_pod: the workers of a pod, whose variables count the pods.

    Raises:
        ConfigError: some of them are missing or inconsistent.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return _read_mpi_env() or _read_pod_env(per_pod)
    needed = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") and _read_int("WORLD_SIZE") > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if not os.environ.get(name):
            raise ConfigError(
                f"{name} is not set, but others of {', '.join(needed)} are; set all of them or none"
            )
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
    """Read the variables that mpirun of Open MPI sets; None without them.

    MASTER_ADDR and MASTER_PORT name the store, by default on this machine if it has all ranks.
    """
    if _read_int("OMPI_COMM_WORLD_SIZE", "1") == 1:
        return None
    world_size = _read_int("OMPI_COMM_WORLD_SIZE")
    is_one_machine = _read_int("OMPI_COMM_WORLD_LOCAL_SIZE", "0") == world_size
    host = os.environ.get("MASTER_ADDR", "localhost" if is_one_machine else "")
    if not host:
        raise ConfigError(
            "mpirun starts ranks on several machines; "
            "pass -x MASTER_ADDR=HOST, the machine of rank 0"
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

    A single pod is standalone.
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
    """Return whether torchrun or a parent of `ddp.nproc_per_node` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _read_int(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


def worker_environ(first: DistEnv, index: int, local_world_size: int) -> dict[str, str]:
    """Return the environment variables of worker `index` of a node, as torchrun sets them.

    Args:
        first: the ranks of the node's first worker.
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
    """Return time.monotonic() at the start of this process, or of the attempt whose worker it is.

    Without Linux's /proc, return the current time.
    """
    if STARTED_AT in os.environ:
        return float(os.environ[STARTED_AT])
    try:
        started_s = int(read_stat("self")[19]) / os.sysconf("SC_CLK_TCK")  # since boot
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        age_s = 0.0
    return time.monotonic() - max(0.0, age_s)
