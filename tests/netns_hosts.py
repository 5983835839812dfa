"""Make two hosts on one machine for torchrun: two network namespaces joined by a veth link.

Each has its own host name and address.
"""

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

# The name of a namespace continues with the id of the process that made it, so that the namespaces
# of other processes are not touched.
PREFIX = "mingpt-test"
NAMES = ("host1", "host2")  # the agent whose name sorts first has rank 0
# Nothing outside a pair of hosts can be reached, so all pairs use the same addresses.
ADDRESSES = ("192.168.113.1", "192.168.113.2")
INTERFACE = "eth0"
NETNS = Path("/run/netns")
ETC_NETNS = Path("/etc/netns")

_count = itertools.count(1)


class HostsUnavailable(Exception):
    """This machine or this user cannot create network namespaces. The message says why."""


class TwoHosts:
    """Two hosts, `names[0]` and `names[1]`, joined by a veth link.

    Each host resolves both names, and they share the disk. The end of the `with` block kills all
    processes on both hosts.
    """

    names = NAMES

    def __init__(self) -> None:
        """
        Raises:
            HostsUnavailable: The user is not root, `ip` is missing, or the kernel refuses.
        """
        missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
        if sys.platform != "linux" or missing or os.geteuid() != 0:
            raise HostsUnavailable(
                "needs Linux and root" if not missing else f"needs {' and '.join(missing)}"
            )
        remove_leftovers()
        number = next(_count)
        self._namespaces = [f"{PREFIX}-{os.getpid()}-{number}-{name}" for name in NAMES]
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise HostsUnavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def start(self, host: int, command: list[str], cwd: Path, **extra: str) -> Job:
        """Run a command on host 0 or 1.

        The process of the job is the command itself, not a wrapper.
        """
        enter = ["ip", "netns", "exec", self._namespaces[host], "unshare", "--uts"]
        rename = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', NAMES[host]]
        return Job([*enter, *rename, *command], cwd, **extra)

    def set_link_down(self) -> None:
        self._set_link(1, "down")

    def set_link_up(self) -> None:
        self._set_link(1, "up")

    def _build(self) -> None:
        known = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        for namespace in self._namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            (ETC_NETNS / namespace).mkdir(parents=True)
            (ETC_NETNS / namespace / "hosts").write_text(
                "\n".join(["127.0.0.1 localhost", *known, ""])
            )
        first, second = self._namespaces
        _ip(
            "link",
            "add",
            INTERFACE,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            second,
        )
        for host, (namespace, address) in enumerate(zip(self._namespaces, ADDRESSES, strict=True)):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
            self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        _ip("-n", self._namespaces[host], "link", "set", INTERFACE, state)

    def _remove(self) -> None:
        for namespace in self._namespaces:
            _remove_namespace(namespace)


def remove_leftovers() -> None:
    """Remove namespaces whose owner has ended, as after a test run that was killed.

    Processes in these namespaces may still run.
    """
    namespaces = {
        path.name
        for directory in (NETNS, ETC_NETNS)
        if directory.is_dir()
        for path in directory.glob(f"{PREFIX}-*")
    }
    for namespace in namespaces:
        owner = namespace.removeprefix(f"{PREFIX}-").split("-")[0]
        if not (owner.isdecimal() and is_running(int(owner))):
            _remove_namespace(namespace)


def _remove_namespace(namespace: str) -> None:
    """Remove a namespace that exists fully, partly, or not at all."""
    if (NETNS / namespace).exists():
        # A concurrent test run may have removed the namespace already.
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in _ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", namespace)
    shutil.rmtree(ETC_NETNS / namespace, ignore_errors=True)


def _ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout
