"""Where this process stands among the ranks, and whom it must not outlive. Only this module reads RANK and the like."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mingpt_ddp.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class DistEnv:
    """This process among the ranks of the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    has_agent: bool = False  # the parent holds the store, and starts this process again when it dies
    master_address: tuple[str, int] = ("", 0)  # host and port of the job's key-value store
    is_standalone: bool = True  # nobody has set RANK and its relatives
    has_local_rank: bool = False  # whoever set them has started this process as one of several on this machine
    shares_devices: bool = False  # the parent has given all of those the same environment, and so the same GPUs

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def call_on_rank_zero(self, fn: Callable[[], T]) -> T | None:
        """Call `fn` on rank zero alone, without communication; return None on every other rank."""
        return fn() if self.is_rank_zero else None


def read_env() -> DistEnv:
    """Read RANK and its relatives, as torchrun or the user's own script sets them.

    Raises:
        ConfigError: some of them are missing or contradict each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return DistEnv()
    needed = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") and _number("WORLD_SIZE") > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set, but others of {', '.join(needed)} are; set all of them or none")
    env = DistEnv(
        rank=_number("RANK"),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=_number("WORLD_SIZE"),
        has_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        master_address=(os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)),
        is_standalone=False,
        has_local_rank="LOCAL_RANK" in os.environ,
        shares_devices="TORCHELASTIC_RUN_ID" in os.environ,
    )
    if not 0 <= env.master_address[1] < 1 << 16:
        raise ConfigError(f"MASTER_PORT={env.master_address[1]} must lie below 65536")
    if not 0 <= env.rank < env.world_size:
        raise ConfigError(f"RANK={env.rank} must lie in 0 .. WORLD_SIZE - 1 = {env.world_size - 1}")
    return env


def read_env_or_default() -> DistEnv:
    """Where this process stands, or that of a single one if that cannot be told."""
    try:
        return read_env()
    except ConfigError:
        return DistEnv()


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


def local_agent_env(port: int, world_size: int) -> DistEnv:
    """The first of `world_size` ranks on this machine, whose parent holds a store at `port`."""
    return DistEnv(world_size=world_size, has_agent=True, master_address=("localhost", port))


def worker_environ(first: DistEnv, index: int, local_world_size: int) -> dict[str, str]:
    """What tells worker number `index` of a machine its env, as torchrun would.

    Args:
        first: the place of the machine's first worker.
    """
    variables = {
        "RANK": first.rank + index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": first.world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": first.master_address[0],
        "MASTER_PORT": first.master_address[1],
        "TORCHELASTIC_RUN_ID": "none",  # it has a parent, which it must not outlive
        "TORCHELASTIC_USE_AGENT_STORE": first.has_agent,
    }
    return {name: str(value) for name, value in variables.items()}


def process_start_time() -> float:
    """When this process began, in seconds since 1970."""
    try:
        return os.stat("/proc/self").st_ctime
    except OSError:  # no such system
        return time.time()


def die_with_parent() -> None:
    """Leave at once when the process that started this one is gone: an orphan must not train beside its successor."""
    parent = os.getppid()
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died while we asked
            os._exit(1)
    else:
        _watch(lambda: os.getppid() != parent)


def _watch(orphaned: Callable[[], bool]) -> None:
    def look() -> None:
        while not orphaned():
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=look, name="parent-watch", daemon=True).start()
