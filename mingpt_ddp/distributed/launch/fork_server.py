"""The fork server: a process that imports torch once, and then forks workers.

It is the forkserver of multiprocessing. It dies with the process that started it, and its children
die with it.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import context, forkserver, process, resource_tracker
from pathlib import Path
from typing import Any

from mingpt_ddp.process.interrupts import SIGNALS
from mingpt_ddp.process.sockets import make_socket_directory

# Modules that the server imports before it forks workers.
PRELOADED = [
    "mingpt_ddp.distributed.launch.preload",
    "mingpt_ddp.cli.train_job",
    "mingpt_ddp.training.run",
    "torch._dynamo",  # the constructor of DistributedDataParallel imports it
]


def start_server() -> None:
    """Start the server, unless it is running.

    It takes some seconds to import torch. Meanwhile this process can continue.
    """
    make_socket_directory()
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = import_path()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces when a store closes
    # Otherwise torch.cuda.is_available() would initialize CUDA, which a forked process cannot use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        with _signals_blocked():
            forkserver.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def import_path() -> str:
    """Return a PYTHONPATH with which an interpreter finds this package, even in a checkout."""
    checkout = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH", "")
    if Path(checkout).name in ("site-packages", "dist-packages"):
        # An installed package needs no entry. In PYTHONPATH, site-packages would come before the
        # standard library and hide its modules.
        return path
    return os.pathsep.join(filter(None, [checkout, path]))


def start_process(new: process.BaseProcess) -> None:
    """Start a process in which SIGNALS are blocked.

    A process that the server forks inherits the blocked signals from the server. In that case, do
    not block them in this process. The server may be stopped, and this process must still react to
    signals while it waits for the server.
    """
    is_forked = isinstance(new, context.ForkServerProcess)
    with contextlib.nullcontext() if is_forked else _signals_blocked():
        new.start()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGNALS in this context. Processes that are started in it inherit the signal mask.

    A terminal or a scheduler may send a signal to all processes of a run. Only the launcher should
    react to it. It then forwards the signal to the workers, which have unblocked it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # The resource tracker should inherit the mask too. Starting it unblocks signals in this
        # process, so block them again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def server_pid() -> int | None:
    """Return the process id of the server, or None if it is not running."""
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def stop_server() -> None:
    """Kill the server, and wait until it has ended. Otherwise it might be asked to fork again."""
    server: Any = forkserver._forkserver
    # Its process id cannot have been reused, because this process has not waited for it yet.
    os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
