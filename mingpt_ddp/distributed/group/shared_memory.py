"""Collectives for ranks on one machine, using Unix sockets and shared memory.

Between two processes on one machine, a gloo collective passes through the kernel's TCP stack and a
thread on each side. For a few megabytes this takes ten times the CPU time of copying and adding,
and for a few bytes a thousand times.

Shared memory and socket names are anonymous, so killed ranks leave no files behind. The kernel
closes the sockets of a dead rank, so the other ranks notice its death immediately.
"""

import contextlib
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SharedMemoryGroup:
    """The connections of this rank to all other ranks."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        """
        Args:
            sockets: Connected sockets, by the rank at the other end.
            timeout_s: Timeout of the sockets in seconds.
        """
        self.rank = rank
        self.timeout_s = timeout_s
        self._sockets = sockets

    def close(self) -> None:
        """Close the connections."""
        for connection in self._sockets.values():
            connection.close()

    def send_all(self, message: bytes) -> None:
        """Send a short message to all other ranks without waiting for them."""
        for rank, connection in self._sockets.items():
            with self._name_peer(rank):
                connection.sendall(message)

    def recv_all(self, size: int) -> dict[int, bytes]:
        """Wait for a message of `size` bytes from every other rank.

        Raises:
            DistNetworkError: A rank has closed its connection, or has sent nothing for `timeout_s`
                seconds.
        """
        messages = {}
        for rank in self._sockets:
            messages[rank], _ = self._recv(rank, size)
        return messages

    def _recv(self, rank: int, size: int) -> tuple[bytes, list[int]]:
        """Return a message of `size` bytes and the file descriptors sent with it."""
        content = b""
        files: list[int] = []
        while len(content) < size:
            with self._name_peer(rank):
                part, received, _, _ = socket.recv_fds(self._sockets[rank], size - len(content), 1)
            if not part:
                raise dist.DistNetworkError(f"rank {rank} has closed its connection")
            content += part
            files += received
        return content, files

    @contextlib.contextmanager
    def _name_peer(self, rank: int) -> Iterator[None]:
        """Re-raise connection errors as errors that name the rank."""
        try:
            yield
        except TimeoutError as error:
            raise dist.DistNetworkError(
                f"rank {rank} has sent nothing for {self.timeout_s:g} s"
            ) from error
        except OSError as error:
            raise dist.DistNetworkError(
                f"the connection to rank {rank} is broken: {error}"
            ) from error

    def all_gather_async(self, parts: list[Tensor], values: Tensor) -> Callable[[], None]:
        """Send a CPU tensor to all ranks, without waiting for them.

        Return a function that waits for the tensors of the other ranks.

        Args:
            parts: Receives the tensors of all ranks, in rank order.
            values: The tensor of this rank.
        """
        self.send_all(values.numpy().tobytes())
        parts[self.rank].copy_(values)

        def wait() -> None:
            for rank, part in self.recv_all(values.nbytes).items():
                parts[rank].copy_(torch.frombuffer(bytearray(part), dtype=values.dtype))

        return wait

    def allocate(self, size: int) -> Tensor:
        """Allocate `size` bytes of memory that all ranks share. A collective."""
        if self.rank == 0:
            file = os.memfd_create("gradients")
            # Reserve the memory now. If it ran out later, a write would raise the signal SIGBUS.
            os.posix_fallocate(file, 0, size)
            for connection in self._sockets.values():
                socket.send_fds(connection, [b"m"], [file])
        else:
            _, [file] = self._recv(0, 1)
        memory = mmap.mmap(file, size)
        os.close(file)
        return torch.frombuffer(memory, dtype=torch.uint8)


def connect_local_ranks(
    rank: int, all_gather: Callable[[Any], list[Any]], timeout_s: float
) -> SharedMemoryGroup | None:
    """Connect all ranks. Return None if they are not all on this machine. A collective.

    The sockets have abstract names, which need no file system and vanish with the process.

    Args:
        all_gather: Sends a JSON value to all ranks. Returns the values of all ranks, in rank order.
    """
    machine = _machine_id()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        name = f"\0mingpt_ddp/{uuid.uuid4().hex}"
        if machine is not None:
            listener.bind(name)
            listener.listen(4096)
        ranks = all_gather([machine, name])
        if machine is None or any(other != machine for other, _ in ranks):
            return None
        listener.settimeout(timeout_s)
        sockets: dict[int, socket.socket] = {}  # by the rank at the other end
        for other, (_, name) in enumerate(ranks[:rank]):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(name)
            connection.settimeout(timeout_s)
            connection.sendall(rank.to_bytes(4, "little"))
            sockets[other] = connection
        while len(sockets) < len(ranks) - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            if _is_own_user(connection):
                other = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
                sockets[other] = connection
        return SharedMemoryGroup(rank, dict(sorted(sockets.items())), timeout_s)


def _is_own_user(connection: socket.socket) -> bool:
    """Return True if the process at the other end belongs to this user.

    Other users could connect too, because /proc/net/unix shows the socket names to all users.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def _machine_id() -> list[str] | None:
    """Return an id of this machine and network namespace. None without abstract socket names."""
    try:
        return [
            socket.gethostname(),
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.readlink("/proc/self/ns/net"),
        ]
    except OSError:
        return None
