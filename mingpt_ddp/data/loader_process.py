"""Set up a process that loads samples for a rank."""

import ctypes
import os
import signal
import socket
import struct
import sys
import uuid
from multiprocessing import connection
from typing import Any


def set_up(_: int) -> None:
    """Let a loader process die with its rank, and ignore signals.

    It has inherited the rank's lock and connections.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
        share_without_files()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def share_without_files() -> None:
    """Have multiprocessing pass the files of tensors through abstract sockets.

    They end with their process. By default it makes a file for the socket in TMPDIR, which stays
    there after SIGKILL, and cannot be made where that is long. /proc/net/unix shows the names of
    abstract sockets to all users: those of others are not accepted.
    """
    module: Any = connection
    accept = module.SocketListener.accept
    arbitrary_address = module.arbitrary_address

    def accept_same_user(listener: Any) -> Any:
        while True:
            peer = accept(listener)
            with socket.socket(fileno=os.dup(peer.fileno())) as opened:
                credentials = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, user, _ = struct.unpack("3i", credentials)
            if user == os.getuid():
                return peer
            peer.close()

    def make_address(family: str) -> Any:
        if family == "AF_UNIX":
            return f"\0mingpt_ddp-{uuid.uuid4().hex}"
        return arbitrary_address(family)

    module.SocketListener.accept = accept_same_user
    module.arbitrary_address = make_address
