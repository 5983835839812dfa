"""Processes forked from a server that has imported torch once: `multiprocessing`'s forkserver.

The server dies with the process that started it, and its children die with the server.
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

PRELOADED = [
    "mingpt_ddp.distributed.launch.preload",
    "mingpt_ddp.cli.train_job",
    "mingpt_ddp.training.run",
    "torch._dynamo",
]


def start_server() -> None:
    """Start the server unless it is running.

    It imports torch for seconds, concurrently with this process.
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
    """Return PYTHONPATH for an interpreter that imports this package, also from a checkout."""
    checkout = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH", "")
    if Path(checkout).name in ("site-packages", "dist-packages"):
        return path  # an installed package needs no entry, which would hide the standard library
    return os.pathsep.join(filter(None, [checkout, path]))


def start_process(new: process.BaseProcess) -> None:
    """Start a process, in which the signals of the launcher are blocked.

    The server has blocked them for those that it forks. This process goes on to handle signals
    then: it waits for a server that may be stopped.
    """
    is_forked = isinstance(new, context.ForkServerProcess)
    with contextlib.nullcontext() if is_forked else _signals_blocked():
        new.start()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGNALS in this context, and in processes that start in it and inherit the mask.

    A terminal or a scheduler may signal all processes of a run. Only the launcher reacts, and
    forwards the signal to the workers, which unblock it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # it inherits the mask too, and unblocks signals here
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
    """Kill the server and wait until it has ended: a dying one would still be asked to fork."""
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)  # do not wait for it: its id is not reused
    server._stop()
