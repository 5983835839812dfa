"""Collectives for ranks on one machine, by Unix sockets and shared memory.

A gloo collective between two processes on one machine passes through the kernel's TCP stack and a
thread on each side: ten times the CPU time of copying and adding for a few megabytes, a thousand
times for a few bytes. Shared memory and socket names are anonymous, so killed ranks leave no files.
The kernel closes a dead rank's sockets, which the others notice immediately.
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
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future

ALIGNMENT = 64  # bytes


class SharedMemoryGroup:
    """The connections of one rank to all others."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        """
        Args:
            sockets: by the rank at the other end.
        """
        self.rank = rank
        self.world_size = len(sockets) + 1
        self.timeout_s = timeout_s
        self._sockets = sockets
        self._skip_bytes = 0  # sent by every other rank, to drop before the next message

    def close(self) -> None:
        """Close the connections."""
        for connection in self._sockets.values():
            connection.close()

    def send_all(self, message: bytes, skip: bool = False) -> None:
        """Send a short message to all other ranks without waiting for them.

        Args:
            skip: the message is an acknowledgement that every rank sends; the next `recv_all` drops
                it.
        """
        for rank, connection in self._sockets.items():
            with self._name_peer(rank):
                connection.sendall(message)
        self._skip_bytes += len(message) if skip else 0

    def recv_all(self, size: int) -> dict[int, bytes]:
        """Wait for a message of `size` bytes from every other rank.

        Raises:
            DistNetworkError: a rank has closed its connection or sent nothing for `timeout_s`
                seconds.
        """
        skip = self._skip_bytes
        self._skip_bytes = 0
        return {rank: self._recv(rank, skip + size)[0][skip:] for rank in self._sockets}

    def _recv(self, rank: int, size: int) -> tuple[bytes, list[int]]:
        """Return a message of `size` bytes and the file descriptors sent with it."""
        content = b""
        files = list[int]()
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
        """Send a CPU tensor to all ranks.

        The returned function waits for theirs and copies all to `parts`.
        """
        self.send_all(values.numpy().tobytes())
        parts[self.rank].copy_(values)

        def wait() -> None:
            for rank, part in self.recv_all(values.nbytes).items():
                parts[rank].copy_(torch.frombuffer(bytearray(part), dtype=values.dtype))

        return wait

    def allocate(self, size: int) -> list[Tensor]:
        """Allocate `size` bytes per rank, in rank order: each rank writes its own and reads all.

        A collective.
        """
        own = os.memfd_create("gradients")
        os.posix_fallocate(own, 0, size)  # insufficient memory raises now, not SIGBUS later
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"m"], [own])
        files = {self.rank: own, **{rank: self._recv(rank, 1)[1][0] for rank in self._sockets}}
        tensors = [
            torch.frombuffer(mmap.mmap(files[r], size), dtype=torch.uint8)
            for r in range(self.world_size)
        ]
        for file in files.values():
            os.close(file)
        return tensors


def connect_local_ranks(
    rank: int, all_gather: Callable[[Any], list[Any]], timeout_s: float
) -> SharedMemoryGroup | None:
    """Connect all ranks; None if they are not all on this machine. A collective.

    The sockets have abstract names, which need no filesystem and end with the process.

    Args:
        all_gather: returns the JSON value of every rank, in rank order.
    """
    machine = _machine()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        name = f"\0mingpt_ddp/{uuid.uuid4().hex}"
        if machine is not None:
            listener.bind(name)
            listener.listen(4096)
        ranks = all_gather([machine, name])
        if machine is None or any(other != machine for other, _ in ranks):
            return None
        listener.settimeout(timeout_s)
        sockets: dict[int, socket.socket] = {}
        for other, (_, name) in enumerate(ranks[:rank]):
            sockets[other] = socket.socket(socket.AF_UNIX)
            sockets[other].connect(name)
            sockets[other].settimeout(timeout_s)
            sockets[other].sendall(rank.to_bytes(4, "little"))
        while len(sockets) < len(ranks) - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            _, user, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if user == os.getuid():  # /proc/net/unix shows the names to all users
                sockets[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = (
                    connection
                )
        return SharedMemoryGroup(rank, dict(sorted(sockets.items())), timeout_s)


def _machine() -> list[str] | None:
    """Return an id of this machine and network namespace; None if the OS lacks abstract socket
    names.
    """
    try:
        return [
            socket.gethostname(),
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.readlink("/proc/self/ns/net"),
        ]
    except OSError:
        return None


class SharedMemoryAllReduce:
    """Average gradients in shared memory.

    Sums are in rank order, independent of the bucketing. It waits for the last bucket: starting
    earlier gains nothing, because the cores that would copy the first buckets are computing the
    others.
    """

    def __init__(self, shared_memory: SharedMemoryGroup, parameters: list[nn.Parameter]) -> None:
        """
        Args:
            parameters: those with gradients.
        """
        self.shared_memory = shared_memory
        self._memory = shared_memory.allocate(
            sum(p.numel() * p.element_size() + ALIGNMENT for p in parameters)
        )
        self._buckets: list[tuple[Tensor, list[Tensor], Future[Tensor]]] = []
        self._end = 0  # bytes of the buckets so far

    def all_reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Copy the bucket to this rank's memory; the last one completes the futures of all."""
        if not self._buckets:
            self.shared_memory.recv_all(0)  # every rank has read the previous step's gradients
            self._end = 0
        buffer = bucket.buffer()
        begin = self._end
        self._end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        parts = [
            memory[begin : begin + buffer.nbytes].view(buffer.dtype) for memory in self._memory
        ]
        torch.mul(buffer, 1 / self.shared_memory.world_size, out=parts[self.shared_memory.rank])
        future: Future[Tensor] = Future()
        self._buckets.append((buffer, parts, future))
        if not bucket.is_last():
            return future
        self.shared_memory.send_all(b"w")  # written
        self.shared_memory.recv_all(1)
        for own, shares, _ in self._buckets:
            torch.add(shares[0], shares[1], out=own)
            for share in shares[2:]:
                own += share
        self.shared_memory.send_all(b"r", skip=True)  # read
        for own, _, waiting in self._buckets:
            waiting.set_result(own)
        self._buckets.clear()
        return future
