"""The key-value store of local workers, in a process of its own: the launcher needs no torch."""

import contextlib
import multiprocessing
import signal
import socket
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from mingpt_ddp.distributed.exit import die_with_parent


@contextlib.contextmanager
def local_store(method: str) -> Iterator[tuple[BaseProcess, int]]:
    """Yield a process to start, which hosts a store on the loopback interface, and its port.

    Args:
        method: how to start it: forkserver or spawn.
    """
    # The address that a client resolves.
    family, *_, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]
    context: Any = multiprocessing.get_context(method)
    with socket.create_server((str(address[0]), 0), family=family) as listener:
        # Clients that connect before it hosts the store wait for it.
        process = context.Process(target=_host, args=(listener,))
        try:
            yield process, listener.getsockname()[1]
        finally:
            if process.pid is not None:
                process.kill()
                process.join()


def _host(listener: socket.socket) -> None:
    """Host the store until SIGKILL, with the other signals blocked as the parent has them."""
    die_with_parent()
    from mingpt_ddp.distributed.rendezvous import loopback_store  # imports torch

    _store = loopback_store(listener)  # as long as this function runs
    while True:
        signal.pause()
