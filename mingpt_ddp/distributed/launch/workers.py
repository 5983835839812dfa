"""Start the worker processes of a run, forward signals to them, and wait for their end."""

import contextlib
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import FrameType

from mingpt_ddp.distributed.device.machine import threads_per_worker
from mingpt_ddp.distributed.launch.channels import WorkerEnds, readable
from mingpt_ddp.distributed.launch.fork_server import start_process
from mingpt_ddp.distributed.launch.slots import bind_cores
from mingpt_ddp.process.exit import FAILURE
from mingpt_ddp.process.interrupts import SIGNALS, handle
from mingpt_ddp.process.linux import STOPPED, read_state, set_process_name
from mingpt_ddp.process.parent_watch import die_with_parent

# It is imported only when it runs, because it is in a higher layer.
TRAIN_MODULE = "mingpt_ddp.cli.train_job"
INTERRUPT_S = 2.0  # seconds for workers to exit by themselves after a second Ctrl-C


class SignalForwarder:
    """Forward the signals that this process receives to all workers that it has started."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._received_at = math.inf  # time.monotonic() of the first signal
        self._interrupted_at = math.inf  # time.monotonic() of a later Ctrl-C
        self._workers: list[BaseProcess] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals in this context, which only the main thread may enter."""
        before = handle(self._forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def started(self, workers: list[BaseProcess]) -> Iterator[None]:
        """Start these workers, and send them the signals that have already arrived."""
        for worker in workers:
            start_process(worker)
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        earlier = [*self.received]
        self._workers = [*self._workers, *workers]
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for number in earlier:
            _send(number, workers)
        try:
            yield
        finally:
            self._workers = [worker for worker in self._workers if worker not in workers]

    def kill_at(self, grace_s: float) -> float:
        """Return the time.monotonic() at which all workers get SIGKILL, or inf without a signal.

        Args:
            grace_s: Seconds for which workers may go on after the first signal.
        """
        return min(self._received_at + grace_s, self._interrupted_at + INTERRUPT_S)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._received_at = min(self._received_at, now)
        if number == signal.SIGINT and self.received:
            self._interrupted_at = min(self._interrupted_at, now)
        self.received.append(number)
        _send(number, self._workers)


def _send(number: int, workers: list[BaseProcess]) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid or 0, number)


def shared_environ(workers: int, is_local: bool, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that are the same for all workers.

    Args:
        workers: Number of workers on this machine.
        is_local: True if all ranks are on this machine.
        threads: Threads of each worker. None for OMP_NUM_THREADS, or else an equal share of cores.
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
    workers: list[BaseProcess],
    timeout_s: float,
    preempted_code: int,
    store: BaseProcess | None = None,
) -> tuple[int, str]:
    """Wait until all workers have exited. If one or the store fails, terminate the other workers.

    If a signal killed the worker that failed first, SIGKILL the other workers at once. They have no
    failure to report, and no collective can complete.

    Args:
        timeout_s: Seconds for the other workers to exit before they get SIGKILL.
        preempted_code: Exit code of a preempted worker, which does not count as failed.
        store: The process that hosts the workers' store. It exits only if it fails.

    Returns:
        The exit code and the name of the process that failed. If none has failed, 0 or
        `preempted_code`, and an empty name.
    """
    while True:
        codes = []
        failed = {}  # name by exit code
        running = []
        for worker in workers:
            code = worker.exitcode  # read it once, because a worker may exit at any moment
            codes.append(code)
            if code is None:
                running.append(worker.sentinel)
            elif code not in (0, preempted_code):
                failed[code] = worker.name
        if failed or not running:
            break
        if store is not None:
            if store.exitcode is not None:
                failed[store.exitcode or FAILURE] = store.name
                break
            running.append(store.sentinel)
        await readable(running)
    if not failed:
        return max(code or 0 for code in codes), ""
    # Find the root cause: a death by signal first, then exit codes 75 and 2, then 1.
    code = min(failed, key=lambda code: (code > 0, -code))
    await _end(workers, timeout_s if code > 0 else 0.0)
    return code, failed[code]


async def _end(workers: list[BaseProcess], timeout_s: float) -> None:
    """Send SIGTERM to the workers, and SIGKILL after `timeout_s` seconds.

    Stopped workers get SIGKILL at once.
    """
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        if timeout_s == 0 or read_state(worker.pid) == STOPPED:
            worker.kill()
        else:
            worker.terminate()
    for worker in workers:
        if worker.exitcode is None:
            await readable([worker.sentinel], max(0, deadline - time.monotonic()))
        worker.kill()
        await readable([worker.sentinel])  # join alone would block other jobs
        worker.join()


def run_worker(
    parent: int,
    environ: dict[str, str],
    job: str,
    ends: WorkerEnds,
) -> None:
    """Train as one rank, in a process that has just been forked or started.

    Args:
        parent: Process id of the fork server, or of the launcher.
        job: What to train, as `Job.to_json` returns it.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.setsid()  # Ctrl-C must arrive once, forwarded by the parent
    os.environ.clear()
    os.environ.update(environ)
    ends.open()
    bind_cores()
    import torch

    # In a forked worker, torch has read OMP_NUM_THREADS of the fork server. Set the number of this
    # worker. The value may also be a list with a number for each nesting level, or not positive.
    with contextlib.suppress(ValueError, RuntimeError):
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    set_process_name(f"rank {environ['RANK']}")
    importlib.import_module(TRAIN_MODULE).train_as_worker(job, ends)
