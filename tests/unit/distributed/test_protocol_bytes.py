"""The number of bytes that a rank sends in our protocols does not grow with the number of ranks.

Rank zero may exchange that many bytes with each other rank. In a broadcast, a rank may forward the
message once per round of torch's binomial tree.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import protocol_parts as parts
import pytest
from counting import TICKS, Network
from counting_store import Count
from torch.distributed import PrefixStore, TCPStore

SIZES = [2, 64]
# average number of bytes for one heartbeat of one rank
MAX_HEARTBEAT_BYTES = 1024
# For each part of a protocol: the most messages and bytes of a rank other than zero, for any number
# of ranks, and the most messages and bytes of rank zero per other rank.
BOUNDS = {
    "join": ((40, 2_000), (40, 2_000)),
    "join again": ((40, 2_000), (40, 2_000)),
    "join, one late": ((320, 10_000), (450, 10_000)),
    "heartbeats": ((48, 4_000), (48, 4_000)),
    "value of rank zero": ((8, 64_000), (8, 64_000)),
    "commit": ((24, 64_000), (24, 64_000)),
}


@pytest.fixture(scope="module", params=SIZES)
def counted(request, tmp_path_factory) -> dict[str, list[Count]]:
    """Run each part on a number of ranks. Return the counts of each rank, by part."""
    size = request.param
    directory = tmp_path_factory.mktemp(f"ranks{size}")
    ranks = parts.Ranks(size, parts.configuration(directory, size))
    return {
        "join": parts.join(size),
        "join again": parts.join(size, attempts=2),
        "join, one late": parts.join(size, parts.LATE_S),
        "heartbeats": parts.heartbeats(ranks),
        "value of rank zero": parts.rank_zero_value(ranks),
        "commit": parts.commit(ranks, directory / "plain"),
    }


@pytest.mark.parametrize("part", BOUNDS)
def test_ranks_other_than_zero_exchange_a_constant_number_of_bytes(counted, part):
    _, *others = counted[part]
    (max_messages, max_bytes), _ = BOUNDS[part]
    assert sum(other.messages for other in others) / len(others) <= max_messages
    assert sum(other.bytes for other in others) / len(others) <= max_bytes
    assert max(other.received for other in others) <= max_bytes
    rounds = math.ceil(math.log2(len(others) + 1))
    assert max(other.messages for other in others) <= max_messages * rounds
    assert max(other.sent for other in others) <= max_bytes * rounds


@pytest.mark.parametrize("part", BOUNDS)
def test_rank_zero_exchanges_a_constant_number_of_bytes_with_each_rank(counted, part):
    zero, *others = counted[part]
    _, (max_messages, max_bytes) = BOUNDS[part]
    assert zero.messages <= max_messages * len(others)
    assert zero.bytes <= max_bytes * len(others)


def test_heartbeats_move_a_kilobyte_each(counted):
    moved = sum(count.bytes for count in counted["heartbeats"])
    assert 0 < moved / TICKS / len(counted["heartbeats"]) <= MAX_HEARTBEAT_BYTES


# Tests of the counting itself


class Wire:
    """A relay in front of a TCPStore. It counts the bytes in each direction."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        port = self.listener.getsockname()[1]
        self.client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self.server.port))
        for source, target, name in ((client, server, "sent"), (server, client, "received")):
            threading.Thread(target=self._relay, args=(source, target, name), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, name: str) -> None:
        while content := source.recv(1 << 16):
            setattr(self, name, getattr(self, name) + len(content))
            target.sendall(content)

    def settled(self) -> tuple[int, int]:
        """Return the bytes sent and received, once the server has handled all requests."""
        # The server answers in order, so requests without a response are handled by now.
        self.client.num_keys()
        return self.sent, self.received


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    relay = Wire()
    yield relay
    relay.listener.close()


CALLS: dict[str, Callable[[Any], Any]] = {
    "set": lambda store: store.set("abc", "12345"),
    "get": lambda store: store.get("abc"),
    "check": lambda store: store.check(["abc", "d"]),
    "wait": lambda store: store.wait(["abc"], timedelta(seconds=1)),
    "multi_get": lambda store: store.multi_get(["abc", "abc"]),
    "multi_set": lambda store: store.multi_set(["k", "kk"], ["v", "ww"]),
    "add": lambda store: store.add("count", 3),
    "add again": lambda store: store.add("count", 4),
    "compare_set": lambda store: store.compare_set("abc", "12345", "67"),
    "compare_set, another": lambda store: store.compare_set("abc", "wrong", "8"),
    "compare_set, new": lambda store: store.compare_set("new", "", "67"),
    "compare_set, missing": lambda store: store.compare_set("missing", "wrong", "67"),
    "delete_key": lambda store: store.delete_key("new"),
}


def test_the_store_counts_the_bytes_of_a_tcp_store(wire):
    """It also returns the same values as a real TCPStore."""
    network = Network(1)
    prefixed = PrefixStore("p", network.stores[0])  # passes values on as bytes
    prefixed_client = PrefixStore("p", wire.client)
    for name, call in CALLS.items():
        sent, received = wire.settled()
        expected = call(prefixed_client)
        later_sent, later_received = wire.settled()
        assert call(prefixed) == expected, name
        network.stores[0].num_keys()
        (count,) = network.take_counts()
        assert (count.sent, count.received) == (later_sent - sent, later_received - received), name
