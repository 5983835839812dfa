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
    agent: bool = False  # an elastic agent started this process and holds the store
    master: tuple[str, int] = ("", 0)  # host and port of the job's key-value store

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
    needed = ["RANK", "WORLD_SIZE"] + (["MASTER_ADDR", "MASTER_PORT"] if _number("WORLD_SIZE") > 1 else [])
    for name in needed:
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set, but others of {', '.join(needed)} are; set all of them or none")
    place = Place(
        rank=_number("RANK"),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=_number("WORLD_SIZE"),
        agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        master=(os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)),
    )
    if not 0 <= place.master[1] < 1 << 16:
        raise ConfigError(f"MASTER_PORT={place.master[1]} must lie below 65536")
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(f"RANK={place.rank} must lie in 0 .. WORLD_SIZE - 1 = {place.world_size - 1}")
    return place


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


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
