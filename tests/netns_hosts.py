"""Two hosts on one machine: network namespaces with names, addresses and a cable of their own, for real torchrun."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launching import Job, is_running

PREFIX = "mingpt-test"  # then the process that made it and a number: nobody else's namespaces are touched
NAMES = ("host1", "host2")  # the agent whose name sorts first has rank 0
ADDRESSES = ("192.168.113.1", "192.168.113.2")  # nothing outside the two can be reached, so every pair may have these
CARD = "eth0"
NAMED = Path("/run/netns")
ETC = Path("/etc/netns")

_count = itertools.count(1)


class NoHosts(Exception):
    """This machine, or this user, cannot have network namespaces; why."""


class TwoHosts:
    """`names[0]` and `names[1]`, joined by a cable; each knows its own name and the other's.

    They share the disk. Everything that runs in them ends with the `with` block.
    """

    names = NAMES

    def __init__(self) -> None:
        """
        Raises:
            NoHosts: there is no root, no `ip`, or the kernel refuses.
        """
        missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
        if sys.platform != "linux" or missing or os.geteuid() != 0:
            raise NoHosts("needs Linux and root" if not missing else f"needs {' and '.join(missing)}")
        remove_leftovers()
        number = next(_count)
        self._spaces = [f"{PREFIX}-{os.getpid()}-{number}-{name}" for name in NAMES]
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise NoHosts(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def start(self, host: int, command: list[str], cwd: Path, **extra: str) -> Job:
        """Run a command on host 0 or 1. The process of the job is the command itself, not a wrapper."""
        enter = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts"]
        rename = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', NAMES[host]]
        return Job([*enter, *rename, *command], cwd, **extra)

    def cut_cable(self) -> None:
        self._card(1, "down")

    def mend_cable(self) -> None:
        self._card(1, "up")

    def _build(self) -> None:
        known = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        for space in self._spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            (ETC / space).mkdir(parents=True)
            (ETC / space / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        first, second = self._spaces
        _ip("link", "add", CARD, "netns", first, "type", "veth", "peer", "name", CARD, "netns", second)
        for host, (space, address) in enumerate(zip(self._spaces, ADDRESSES, strict=True)):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", CARD)
            self._card(host, "up")

    def _card(self, host: int, state: str) -> None:
        _ip("-n", self._spaces[host], "link", "set", CARD, state)

    def _remove(self) -> None:
        for space in self._spaces:
            _remove_space(space)


def remove_leftovers() -> None:
    """What a killed run of the tests could not remove: its owner is gone, its processes may still run."""
    spaces = {path.name for directory in (NAMED, ETC) if directory.is_dir() for path in directory.glob(f"{PREFIX}-*")}
    for space in spaces:
        owner = space.removeprefix(f"{PREFIX}-").split("-")[0]
        if not (owner.isdecimal() and is_running(int(owner))):
            _remove_space(space)


def _remove_space(space: str) -> None:
    """Whether it exists wholly, in part or not at all."""
    if (NAMED / space).exists():
        with contextlib.suppress(subprocess.CalledProcessError):  # another run of the tests was faster
            for pid in _ip("netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", space)
    shutil.rmtree(ETC / space, ignore_errors=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
