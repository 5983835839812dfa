"""Processes forked from a server that has imported torch once: `multiprocessing`'s forkserver.

The server dies with the process that started it, and its children die with the server.
"""

import contextlib
import os
import signal
import socket
import tempfile
from multiprocessing import context, forkserver, process, resource_tracker
from pathlib import Path
from typing import Any

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
DESCRIPTORS = "/proc/self/fd/"
LONGEST_TMPDIR = 65  # bytes: the server's socket is 38 longer, an address has at most 103
PRELOADED = [
    "mingpt_ddp.distributed.preload",
    "mingpt_ddp.cli.train_job",
    "mingpt_ddp.training.run",
    "torch._dynamo",
    "mingpt_ddp.distributed.preload_later",  # the last: it interrupts no import
]


def start_server() -> None:
    """Start the server unless it is running.

    It imports torch for seconds, concurrently with this process.
    """
    before = dict(os.environ)
    directory = tempfile.tempdir
    os.environ["PYTHONPATH"] = import_path()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces when a store closes
    # Otherwise torch.cuda.is_available() would initialize CUDA, which a forked process cannot use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        _ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = directory


def _ensure_running() -> None:
    """Start the server unless it is running, and delete its socket.

    A killed process would leave the socket in TMPDIR. From then on, this process connects to it by
    a descriptor. Where that does not work, multiprocessing makes the directory, and `exit_process`
    deletes it.
    """
    server: Any = forkserver._forkserver
    current: Any = process.current_process()
    config: dict[str, Any] = current._config
    before = config.get("tempdir")
    address = server._forkserver_address
    with tempfile.TemporaryDirectory(prefix="mingpt_ddp-", ignore_cleanup_errors=True) as directory:
        by_descriptor = _connects_by_descriptor(directory)
        if by_descriptor:
            config["tempdir"] = directory
        try:
            server.ensure_running()
            if by_descriptor and server._forkserver_address != address:
                descriptor = os.open(server._forkserver_address, os.O_PATH)
                server._forkserver_address = f"{DESCRIPTORS}{descriptor}"
        finally:
            if by_descriptor:
                config["tempdir"] = before


def _connects_by_descriptor(directory: str) -> bool:
    """Return whether a socket can be connected to after its deletion: on Linux, with /proc."""
    path = f"{directory}/test"
    with (
        contextlib.suppress(OSError, AttributeError),  # no O_PATH
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        listener.bind(path)
        listener.listen()
        descriptor = os.open(path, os.O_PATH)
        try:
            os.unlink(path)
            client.connect(f"{DESCRIPTORS}{descriptor}")
            return True
        finally:
            os.close(descriptor)
    return False


def import_path() -> str:
    """Return PYTHONPATH for an interpreter that imports this package, also from a checkout."""
    checkout = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    if Path(checkout).name in ("site-packages", "dist-packages"):
        return path  # an installed package needs no entry, which would hide the standard library
    return os.pathsep.join(filter(None, [checkout, path]))


def start_process(new: process.BaseProcess) -> None:
    """Start a process, in which the signals of the launcher are blocked.

    The server has blocked them for those that it forks. This process goes on to handle signals
    then: it waits for a server that may be stopped.
    """
    resource_tracker.ensure_running()  # it unblocks signals: not below, where `new` inherits that
    if isinstance(new, context.ForkServerProcess):
        new.start()
        return
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        new.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def server_pid() -> int | None:
    """Return the process id of the server; None if it is not running."""
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def stop_server() -> None:
    """Kill the server and wait until it has ended: a dying one would still be asked to fork."""
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)  # not waited for: its id is not reused
    address = server._forkserver_address
    if address.startswith(DESCRIPTORS):
        os.close(int(address.removeprefix(DESCRIPTORS)))
        server._forkserver_address = "\0"  # there is no file for `_stop` to delete
    server._stop()
