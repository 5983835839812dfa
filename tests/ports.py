"""Choose free ports for servers that start some time later."""

import random
import socket
from itertools import islice
from pathlib import Path

LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """Return free ports outside the range from which the kernel assigns ports.

    So a concurrent test cannot get them before the server starts. If the kernel assigns all ports,
    return any free ones.
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
