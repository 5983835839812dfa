"""The worker processes of one attempt: how they start, get signals, and end."""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType

from omegaconf import DictConfig

from mingpt_ddp.distributed.channels import WorkerEnds, readable
from mingpt_ddp.distributed.fork_server import BLOCKED_SIGNALS
from mingpt_ddp.distributed.machine import threads_per_worker
from mingpt_ddp.distributed.slots import bind_cores

COMMAND = "mingpt_ddp.cli.train_job"  # a higher layer: named, not imported


class SignalForwarder:
    """Forward the signals that this process receives to all workers that it has started."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._workers: list[BaseProcess] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in this context; only the main thread may enter it."""
        handlers = {}  # those before
        for number in BLOCKED_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
                handlers[number] = signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def started(self, workers: list[BaseProcess]) -> Iterator[None]:
        """Start these workers; they also get the signals that have arrived before."""
        # It unblocks signals: not below, where a worker would inherit that.
        resource_tracker.ensure_running()
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        earlier = [*self.received]
        try:
            for worker in workers:
                worker.start()
            self._workers = [*self._workers, *workers]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for number in earlier:
            _send(number, workers)
        try:
            yield
        finally:
            self._workers = [worker for worker in self._workers if worker not in workers]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        _send(number, self._workers)


def _send(number: int, workers: list[BaseProcess]) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid or 0, number)


def shared_environ(workers: int, is_local: bool, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that are the same for all workers.

    Args:
        is_local: all ranks are on this machine.
        threads: of each worker; None: OMP_NUM_THREADS, or the cores of this machine, divided.
    """
    shared = dict(os.environ)
    if is_local:
        # By default gloo and NCCL listen on an address that other machines can reach.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        shared.setdefault("GLOO_SOCKET_IFNAME", loopback)
        shared.setdefault("NCCL_SOCKET_IFNAME", loopback)
    shared.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers)))
    if threads is not None:
        shared["OMP_NUM_THREADS"] = str(threads)
    return shared


async def join_workers(
    workers: list[BaseProcess], timeout_s: float, preempted_code: int
) -> tuple[int, int]:
    """Wait until all workers have exited. When one fails, terminate the others.

    If a signal killed it, SIGKILL them: there is no failure to report, and no collective can
    complete.

    Args:
        timeout_s: for the others to exit before SIGKILL.
        preempted_code: exit code of a preempted worker, which has not failed.

    Returns:
        The exit code and the index of the worker that failed; else 0 or `preempted_code`, and 0.
    """
    while True:
        codes = []
        failed = {}  # worker by exit code
        running = []
        for index, worker in enumerate(workers):
            code = worker.exitcode  # read once: a worker may exit at any moment
            codes.append(code)
            if code is None:
                running.append(worker.sentinel)
            elif code not in (0, preempted_code):
                failed[code] = index
        if failed or not running:
            break
        await readable(running)
    if not failed:
        return max(code or 0 for code in codes), 0
    # The root cause: a signal causes others' errors, and 2 and 75 cause others' 1.
    code = min(failed, key=lambda code: (code > 0, -code))
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        if code < 0:
            worker.kill()
        else:
            worker.terminate()
    for worker in workers:
        if worker.exitcode is None:
            await readable([worker.sentinel], max(0, deadline - time.monotonic()))
        worker.kill()
        worker.join()
    return code, failed[code]


def run_worker(
    environ: dict[str, str], overrides: list[str], composed: DictConfig, ends: WorkerEnds
) -> None:
    """Train as one rank, in a process that has just been forked or started.

    Args:
        composed: the configuration of the overrides.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the server's timer
    os.setsid()  # so that Ctrl-C on the terminal arrives once, forwarded by the parent
    os.environ.clear()
    os.environ.update(environ)
    ends.open()
    bind_cores()
    import torch

    # torch read the variable when the server imported it. It may be a list, one number per nesting
    # level, or not positive.
    with contextlib.suppress(ValueError, RuntimeError):
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    if sys.platform == "linux":
        PR_SET_NAME = 15  # of <sys/prctl.h>, for ps and top
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {environ['RANK']}".encode())
    sys.argv[1:] = overrides
    importlib.import_module(COMMAND).main(composed)
