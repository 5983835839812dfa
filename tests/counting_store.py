"""A key-value store for ranks that are threads. It counts the traffic of each rank.

A request and its response are one message each, with the bytes that torch's TCPStore sends: one
byte for the type of query, and 8 bytes of length before every key, value and list. Each key begins
with "/". `get` and `multi_get` first ask to wait for their keys, and `set` has no response. TCP
headers are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from turns import Turns

ROUND_TRIP_S = 0.0001  # duration of a request to the store on the network of a cluster
TIMEOUT = timedelta(seconds=300)  # torch's default
LENGTH = 8  # bytes of a length or a number
PREFIX = 1  # bytes of the "/" before a key


@dataclass
class Count:
    """The traffic of a rank: the messages and bytes that it sent and received."""

    messages: int = 0
    sent: int = 0  # bytes
    received: int = 0

    @property
    def bytes(self) -> int:
        return self.sent + self.received

    def send(self, size: int, messages: int = 1) -> None:
        """Count messages of `size` bytes each."""
        self.messages += messages
        self.sent += size * messages

    def receive(self, size: int, messages: int = 1) -> None:
        """Count messages of `size` bytes each."""
        self.messages += messages
        self.received += size * messages


class CountingStore(dist.Store):
    """A rank's client of the key-value store that all ranks share.

    Its methods have the names and return values that torch's C++ code expects, so that PrefixStore
    accepts it.
    """

    def __init__(self, values: dict[str, bytes], turns: Turns, count: Count) -> None:
        """
        Args:
            values: The content of the store, which all ranks share.
            turns: The clock of the ranks.
            count: Traffic of this rank, which each request increases.
        """
        super().__init__()
        self._values = values
        self._turns = turns
        self._count = count

    def _ask(self, request: int, response: int) -> None:
        self._count.send(1 + request)
        self._count.receive(response)
        self._turns.sleep(ROUND_TRIP_S)

    def _change(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._turns.notify(("key", key))

    def set(self, key: str, value: Any) -> None:
        self._count.send(1 + _size(key) + LENGTH + len(value))
        self._change(key, bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        self._ask(_size(key), LENGTH + len(self._values[key]))
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        values = [self._values[key] for key in keys]
        self._ask(_size(*keys) + LENGTH, sum(LENGTH + len(value) for value in values))
        return values

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        size = sum(LENGTH + len(value) for value in values)
        self._count.send(1 + LENGTH + _size(*keys) + size)
        for key, value in zip(keys, values, strict=True):
            self._change(key, bytes(value))

    def check(self, keys: list[str]) -> bool:
        self._ask(LENGTH + _size(*keys), 1)
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = (timeout or TIMEOUT).total_seconds()
        until = self._turns.now + limit
        self._ask(LENGTH + _size(*keys), 1)
        for key in keys:
            while key not in self._values:
                if not self._turns.wait(("key", key), until):
                    self._count.send(1)  # cancels the wait
                    raise dist.DistStoreError(f"wait timeout after {limit:g} s, keys: {key}")

    def add(self, key: str, amount: int) -> int:
        self._ask(_size(key) + LENGTH, LENGTH)
        total = int(self._values.get(key, b"0")) + amount
        self._change(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        current = self._values.get(key)
        if current is None:
            result = bytes(expected if expected else desired)
        else:
            result = bytes(desired) if current == bytes(expected) else current
        if result == bytes(desired) and (current is not None or not expected):
            self._change(key, result)
        request = _size(key) + LENGTH + len(expected) + LENGTH + len(desired)
        self._ask(request, LENGTH + len(result))
        return result

    def delete_key(self, key: str) -> bool:
        self._ask(_size(key), LENGTH)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        self._ask(0, LENGTH)
        return len(self._values)

    # C++ calls these two methods by other names.
    deleteKey = delete_key
    getNumKeys = num_keys


def _size(*keys: str) -> int:
    return sum(LENGTH + PREFIX + len(key.encode()) for key in keys)
