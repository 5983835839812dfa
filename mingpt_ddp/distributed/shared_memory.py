"""ProcessGroup on one machine tell each other things through sockets and memory that they share.

A gloo collective between two processes of one machine goes through the kernel's TCP stack and a thread on each side:
for a few megabytes that costs ten times the CPU time of copying and adding them, and for a few bytes a thousand times.
Here memory is anonymous and the sockets' names are gone once all have met, so that nothing is left of ranks that were
killed; a rank that dies closes its sockets, which the others notice at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHORT_LIVED = "/dev/shm"  # where the sockets' names are: on Linux a directory that no two machines share


class SharedMemoryGroup:
    """The connections of one rank to all others."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        """
        Args:
            sockets: by the rank at the other end.
        """
        self.rank, self.world_size, self.timeout_s = rank, len(sockets) + 1, timeout_s
        self._sockets = sockets
        self._unread_bytes = 0  # bytes that every other rank sends before those that are asked for next
        for connection in sockets.values():
            connection.settimeout(timeout_s)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def send_all(self, message: bytes) -> None:
        """Send a short message to all others; returns at once."""
        for rank, connection in self._sockets.items():
            with self._naming(rank):
                connection.sendall(message)

    def recv_all(self, size: int) -> dict[int, bytes]:
        """The next message, of `size` bytes, from every other rank.

        Raises:
            DistNetworkError: a rank is gone or silent.
        """
        skip, self._unread_bytes = self._unread_bytes, 0
        return {rank: self._receive(rank, skip + size)[skip:] for rank in self._sockets}

    def signal_all(self, message: bytes) -> None:
        """Tell all others something that all of them tell as well, and of which only the arrival matters later."""
        self.send_all(message)
        self._unread_bytes += len(message)

    def _receive(self, rank: int, size: int) -> bytes:
        content = b""
        while len(content) < size:
            with self._naming(rank):
                part = self._sockets[rank].recv(size - len(content))
            if not part:
                raise dist.DistNetworkError(f"rank {rank} has closed its connection")
            content += part
        return content

    @contextlib.contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Say which rank it was."""
        try:
            yield
        except TimeoutError as error:
            raise dist.DistNetworkError(f"rank {rank} has been silent for {self.timeout_s:g} s") from error
        except OSError as error:
            raise dist.DistNetworkError(f"the connection to rank {rank} is broken: {error}") from error

    def shared_memory(self, size: int) -> list[Tensor]:
        """`size` bytes of every rank, in rank order: each writes to its own, and reads all. A collective."""
        own = os.memfd_create("gradients")
        os.posix_fallocate(own, 0, size)  # memory that is not there is told now, not by a signal later
        parts = {self.rank: own}
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"m"], [own])
        for rank, connection in self._sockets.items():
            with self._naming(rank):
                _, handles, _, _ = socket.recv_fds(connection, 1, 1)
            if not handles:
                raise dist.DistNetworkError(f"rank {rank} has closed its connection")
            parts[rank] = handles[0]
        tensors = [torch.frombuffer(mmap.mmap(parts[r], size), dtype=torch.uint8) for r in range(self.world_size)]
        for handle in parts.values():
            os.close(handle)
        return tensors


def connect_local_ranks(rank: int, gather: Callable[[Any], list[Any]], timeout_s: float) -> SharedMemoryGroup | None:
    """Connect to all other ranks; None where they are not all on this machine. A collective.

    Args:
        gather: hands every rank's JSON value to all, in rank order.
    """
    made = _directory() if rank == 0 and hasattr(os, "memfd_create") else None
    directory = gather(made)[0]
    with contextlib.ExitStack() as held:
        if made:
            held.callback(shutil.rmtree, made, ignore_errors=True)
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        there = gather(directory is not None and _listen(listener, f"{directory}/{rank}"))
        if not all(there):
            return None
        listener.settimeout(timeout_s)
        sockets: dict[int, socket.socket] = {}
        for other in range(rank):
            sockets[other] = socket.socket(socket.AF_UNIX)
            sockets[other].connect(f"{directory}/{other}")
            sockets[other].sendall(rank.to_bytes(4, "little"))
        for _ in range(rank + 1, len(there)):
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            sockets[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
        gather(None)  # before the names go, all have met
        return SharedMemoryGroup(rank, dict(sorted(sockets.items())), timeout_s)


def _directory() -> str | None:
    """One that nobody else may enter."""
    try:
        return tempfile.mkdtemp(prefix="ranks-", dir=SHORT_LIVED)
    except OSError:
        return None


def _listen(listener: socket.socket, name: str) -> bool:
    try:
        listener.bind(name)
        listener.listen(4096)
    except OSError:
        return False
    return True
