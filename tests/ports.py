"""Free ports for servers that start later than they are chosen."""

import random
import socket
from itertools import islice
from pathlib import Path

LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """Return ports below those that the kernel gives to anybody: a test beside this one must not
    get them meanwhile.

    Where the kernel gives all of them, any free ones.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    highest = int(limits.read_text().split()[0]) if limits.exists() else 32_768
    ports = range(LOWEST, highest) or range(LOWEST, 1 << 16)
    return list(islice(filter(_is_free, random.SystemRandom().sample(ports, len(ports))), count))


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
