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

from mingpt_ddp.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """This process among the ranks of the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    agent: bool = False  # the parent holds the store, and starts this process again when it dies
    master: tuple[str, int] = ("", 0)  # host and port of the job's key-value store
    alone: bool = True  # nobody has set RANK and its relatives
    worker: bool = False  # whoever set them has started this process as one of several on this machine
    siblings: bool = False  # the parent has given all of those the same environment, and so the same GPUs

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def find_place() -> Place:
    """Read RANK and its relatives, as torchrun or the user's own script sets them.

    Raises:
        ConfigError: some of them are missing or contradict each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Place()
    needed = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") and _number("WORLD_SIZE") > 1:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    for name in needed:
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set, but others of {', '.join(needed)} are; set all of them or none")
    place = Place(
        rank=_number("RANK"),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=_number("WORLD_SIZE"),
        agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        master=(os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)),
        alone=False,
        worker="LOCAL_RANK" in os.environ,
        siblings="TORCHELASTIC_RUN_ID" in os.environ,
    )
    if not 0 <= place.master[1] < 1 << 16:
        raise ConfigError(f"MASTER_PORT={place.master[1]} must lie below 65536")
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(f"RANK={place.rank} must lie in 0 .. WORLD_SIZE - 1 = {place.world_size - 1}")
    return place


def place_or_default() -> Place:
    """Where this process stands, or that of a single one if that cannot be told."""
    try:
        return find_place()
    except ConfigError:
        return Place()


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


def under_agent(port: int, world_size: int) -> Place:
    """The first of `world_size` ranks on this machine, whose parent holds a store at `port`."""
    return Place(world_size=world_size, agent=True, master=("localhost", port))


def worker_variables(first: Place, index: int, local_world_size: int) -> dict[str, str]:
    """What tells worker number `index` of a machine its place, as torchrun would.

    Args:
        first: the place of the machine's first worker.
    """
    variables = {
        "RANK": first.rank + index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": first.world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": first.master[0],
        "MASTER_PORT": first.master[1],
        "TORCHELASTIC_RUN_ID": "none",  # it has a parent, which it must not outlive
        "TORCHELASTIC_USE_AGENT_STORE": first.agent,
    }
    return {name: str(value) for name, value in variables.items()}


def started_at() -> float:
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
