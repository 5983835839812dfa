"""Processes forked from a server that has imported torch once: `multiprocessing`'s forkserver.

The server dies with the process that started it, and its children die with the server.
"""

import os
import signal
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
LONGEST_TMPDIR = 70  # bytes: the server's socket is 32 longer, and a socket's address has at most 103
PRELOADED = ["mingpt_ddp.distributed.preload", "mingpt_ddp.cli.train", "mingpt_ddp.training.run", "torch._dynamo"]


def start_server() -> None:
    """Start the server unless it is running; it imports torch for seconds, concurrently with this process."""
    before, directory = dict(os.environ), tempfile.tempdir
    os.environ["PYTHONPATH"] = import_path()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces when a store closes
    # Otherwise torch.cuda.is_available() would initialize CUDA, which a forked process cannot use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = directory


def import_path() -> str:
    """Return PYTHONPATH for a new interpreter that imports this package, which may be in a checkout."""
    checkout, path = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    if Path(checkout).name in ("site-packages", "dist-packages"):  # it would hide the standard library
        return path
    return os.pathsep.join(filter(None, [checkout, path]))


def stop_server() -> None:
    """Kill the server and wait until it has ended: one that is still dying would be asked to fork."""
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)  # a child that nobody has waited for: its id is not reused
    server._stop()
