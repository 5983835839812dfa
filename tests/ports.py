"""Free ports for servers that start later than they are chosen."""

import random
import socket
from pathlib import Path

LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """Return ports below those that the kernel gives to anybody: a test beside this one must not get them meanwhile."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    highest = int(limits.read_text().split()[0]) if limits.exists() else 32_768
    candidates = random.SystemRandom().sample(range(LOWEST, highest), highest - LOWEST)
    return [port for port, _ in zip(filter(_is_free, candidates), range(count), strict=False)]


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
