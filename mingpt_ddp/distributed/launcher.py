"""Start the workers of `ddp.nproc_per_node`, wait for them, and restart all when one dies."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import STARTED_AT, DistEnv, worker_environ
from mingpt_ddp.distributed.exit import EX_TEMPFAIL, FAILURE, USER_ERROR
from mingpt_ddp.distributed.fork_server import BLOCKED_SIGNALS, start_server, stop_server
from mingpt_ddp.distributed.machine import threads_per_worker
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_dir import RunStatus, read_result

log = logging.getLogger(__name__)

STORE_LINGER_S = 3.0  # for which the store outlives a failure: other nodes read the reason
SERVER_DIED = 255  # exit code of a worker whose fork server has died (popen_forkserver)
EXIT_MARGIN_S = 5.0  # beyond the grace period, for the other workers to exit after one has failed


def train_on_workers(
    config: Config, env: DistEnv, directory: Path, overrides: list[str], started_at: float
) -> tuple[int, bool]:
    """Start `ddp.nproc_per_node` workers and wait until they have trained.

    Args:
        env: the ranks of the first worker.
        directory: the run's.
        overrides: the command line that composes `config`.
        started_at: time.monotonic() when this run began.

    Returns:
        The exit code: 0 after a complete run, ddp.preempted_exit_code after a preempted one,
        128 + n if signal n ended it otherwise. And whether this process received a signal,
        possibly too late for the run.

    Raises:
        ConfigError: WORLD_SIZE is too small for the workers.
        RunError: the store cannot be hosted at MASTER_ADDR:MASTER_PORT.
    """
    n = config.ddp.local_workers
    if not env.is_rank_zero:
        logs.to_console(DistEnv())
        log.info("starting %d local workers; rank 0 runs at %s:%d", n, *env.master_address)
    world_size = n if env.is_standalone else env.world_size
    if env.rank + n > world_size:
        raise ConfigError(
            f"RANK={env.rank} and ddp.nproc_per_node={n} need WORLD_SIZE={env.rank + n} or more"
        )
    if config.ddp.launcher == "forkserver":
        start_server()
    # This imports torch, as the server does meanwhile.
    from mingpt_ddp.distributed.rendezvous import connect, loopback_store

    first = replace(env, world_size=world_size, has_agent=True)
    if env.is_standalone:
        store = loopback_store()  # until this function returns
        first = replace(first, master_address=("localhost", store.port))
    elif env.is_rank_zero:
        connect(env, 0, config.ddp.timeout_s)  # hosts a store for the lifetime of this process
    attempt = partial(_run_attempt, config, first, overrides)
    code, interrupted = _run_with_restarts(attempt, started_at, config.ddp, directory)
    if code and env.is_rank_zero and not env.is_standalone:
        time.sleep(STORE_LINGER_S)
    return code, interrupted


def run_under_torchrun(module: str, workers: int, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun, which runs the module in local workers."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", f"--nproc_per_node={workers}"]
    command += ["-m", module, *arguments]
    os.execve(sys.executable, command, _shared_environ(workers, is_local=True))


def _run_with_restarts(
    attempt: Callable[[float], tuple[int, int]],
    started_at: float,
    config: DDPConfig,
    directory: Path,
) -> tuple[int, bool]:
    """Call `attempt`, with its start time, until it succeeds or a restart would not help.

    Args:
        attempt: returns the same as `_run_attempt`.

    Returns:
        The same as `train_on_workers`.
    """
    before = read_result(directory)
    for restart in range(config.max_restarts + 1):
        if restart:
            log.warning("restart %d of %d", restart, config.max_restarts)
        code, received = attempt(started_at)
        started_at = time.monotonic()
        if received:
            result = read_result(directory)
            if result.get("status") == RunStatus.PREEMPTED:
                return config.preempted_exit_code, True
            is_complete = result and result != before
            return 0 if is_complete else 128 + received, True
        if code in (0, USER_ERROR, config.preempted_exit_code):
            return code, False
    return USER_ERROR if code == EX_TEMPFAIL else FAILURE, False


def _run_attempt(
    config: Config, first: DistEnv, overrides: list[str], started_at: float
) -> tuple[int, int]:
    """Start the workers once and wait for all; launchers on other nodes may start further ranks.

    Args:
        first: the ranks of the first worker.
        started_at: time.monotonic() when this attempt began.

    Returns:
        The exit code of the first worker that failed, -n if signal n killed it, else 0 or
        ddp.preempted_exit_code; and the signal that this process received, or 0.
    """
    n = config.ddp.local_workers
    preempted_code = config.ddp.preempted_exit_code
    if config.ddp.launcher == "forkserver":
        start_server()  # again, if it has died
    context: Any = multiprocessing.get_context(config.ddp.launcher)
    shared = _shared_environ(n, first.is_standalone)
    workers = []
    for index in range(n):
        environ = {**shared, **worker_environ(first, index, n), STARTED_AT: str(started_at)}
        workers.append(context.Process(target=_worker, args=(environ, overrides)))
    received: list[int] = []
    try:
        with _started(workers, received):
            timeout_s = config.snapshot.grace_seconds + EXIT_MARGIN_S
            code, failed = _join(workers, timeout_s, preempted_code)
    except (EOFError, ConnectionError):  # the fork server died before it had forked all
        code = SERVER_DIED
        failed = 0
    # The result of a run tells whether a signal ended it, but other nodes may not see result.json.
    can_tell = code not in (0, preempted_code) or first.is_standalone
    number = received[-1] if received and can_tell else 0
    if code < 0 and not number:  # it could not log this itself
        killer = signal.Signals(-code).name
        log.error("error: rank %d was killed by %s", first.rank + failed, killer)
    if code == SERVER_DIED and config.ddp.launcher == "forkserver":
        stop_server()
        if not number:
            log.error("error: the fork server of the workers was killed")
    return code, number


def _shared_environ(workers: int, is_local: bool) -> dict[str, str]:
    """Return the environment variables that are the same for all workers.

    Args:
        is_local: all ranks are on this machine.
    """
    shared = dict(os.environ)
    if is_local:
        # By default gloo and NCCL listen on an address that other machines can reach.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        shared.setdefault("GLOO_SOCKET_IFNAME", loopback)
        shared.setdefault("NCCL_SOCKET_IFNAME", loopback)
    shared.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers)))
    return shared


@contextlib.contextmanager
def _started(workers: list[BaseProcess], received: list[int]) -> Iterator[None]:
    """Start the workers; forward the signals that this process receives.

    Args:
        received: the signals are appended to it.
    """
    unsent: deque[int] = deque()  # a handler may interrupt itself

    def send() -> None:
        pids = [worker.pid for worker in workers if worker.pid]
        while unsent and len(pids) == len(workers):
            with contextlib.suppress(IndexError):
                number = unsent.popleft()
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        unsent.append(number)
        send()

    # It unblocks signals: not below, where a worker would inherit that.
    resource_tracker.ensure_running()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    handlers = {}  # those before
    for number in BLOCKED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
            handlers[number] = signal.signal(number, forward)
    try:
        try:
            for worker in workers:
                worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        send()  # what arrived before all had started
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _join(workers: list[BaseProcess], timeout_s: float, preempted_code: int) -> tuple[int, int]:
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
        connection.wait(running)
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
        worker.join(max(0, deadline - time.monotonic()))
        worker.kill()
        worker.join()
    return code, failed[code]


def _worker(environ: dict[str, str], overrides: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    os.setsid()  # so that Ctrl-C on the terminal arrives once, forwarded by the parent
    os.environ.clear()
    os.environ.update(environ)
    import torch

    # torch read the variable when the server imported it. It may be a list, one number per nesting
    # level, or not positive.
    with contextlib.suppress(ValueError, RuntimeError):
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    if sys.platform == "linux":
        PR_SET_NAME = 15  # of <sys/prctl.h>, for ps and top
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {environ['RANK']}".encode())
    sys.argv[1:] = overrides
    runpy.run_module("mingpt_ddp", run_name="__main__")
