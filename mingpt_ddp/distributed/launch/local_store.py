"""Host the store of local workers in a separate process, so the launcher need not import torch."""

import multiprocessing
import signal
import socket
from multiprocessing.process import BaseProcess
from typing import Any

from mingpt_ddp.distributed.launch.fork_server import start_process
from mingpt_ddp.process.parent_watch import die_with_parent

PROCESS_NAME = "the store of the workers"


class LocalStore:
    """A process that hosts a store on the loopback interface, for all attempts of a launch."""

    def __init__(self, method: str) -> None:
        """
        Args:
            method: Start method of the process: forkserver or spawn.
        """
        self.method = method
        self.process: BaseProcess | None = None
        self.port = 0

    def ensure_running(self) -> None:
        """Start the process, unless it is running.

        Clients may connect from now on, and wait until the process hosts the store. Only that
        process has the socket, so the kernel closes all connections when it dies.
        """
        if self.process is not None and self.process.exitcode is None:
            return
        # The address to which clients resolve localhost.
        family, *_, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]
        context: Any = multiprocessing.get_context(self.method)
        with socket.create_server((str(address[0]), 0), family=family) as listener:
            self.port = listener.getsockname()[1]
            process = context.Process(target=_host, args=(listener,), name=PROCESS_NAME)
            start_process(process)
        self.process = process

    def stop(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()  # do not join: a stopped fork server would not report the exit


def _host(listener: socket.socket) -> None:
    """Host the store until SIGKILL. The parent has blocked all other signals."""
    die_with_parent()
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    listening = listener.detach()  # by default the store would listen on all interfaces
    _store = TCPStore(  # lives as long as this function runs
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening
    )
    while True:
        signal.pause()
