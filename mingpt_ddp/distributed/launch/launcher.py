"""Start the workers of a run, wait for them, and restart all when one dies.

An event loop waits, so that one process can run several jobs of a sweep at a time.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mingpt_ddp.config.job import Job, RunStatus
from mingpt_ddp.config.keys.schema import DDPConfig
from mingpt_ddp.distributed.device.machine import canonical_threads
from mingpt_ddp.distributed.launch.channels import Channels, PrunerCallback
from mingpt_ddp.distributed.launch.fork_server import server_pid, start_server, stop_server
from mingpt_ddp.distributed.launch.local_store import LocalStore
from mingpt_ddp.distributed.launch.process_watch import ProcessWatch
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.distributed.launch.workers import (
    SignalForwarder,
    join_workers,
    run_worker,
    shared_environ,
)
from mingpt_ddp.errors import ConfigError, UserError
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import STARTED_AT, DistEnv, worker_environ
from mingpt_ddp.process.exit import EX_TEMPFAIL, FAILURE, USER_ERROR
from mingpt_ddp.process.sockets import make_socket_directory
from mingpt_ddp.storage.run_directory import read_result

log = logging.getLogger(__name__)

# Keep the store alive this long after a failure, so that other nodes can read the cause.
STORE_LINGER_S = 3.0
SERVER_DIED = 255  # exit code of a worker whose fork server has died (popen_forkserver)
# After a failure, the other workers may take this much longer than the grace period to exit.
EXIT_MARGIN_S = 5.0


@dataclass(frozen=True)
class Launch:
    """A job to train on local workers."""

    job: Job
    pruner: PrunerCallback | None = None  # called with each evaluation; None outside of a search
    slot: Slot | None = None  # slot of a concurrent job; None for the whole machine and the console
    threads: int | None = None  # threads of each worker; None for an equal share of the cores


@dataclass(frozen=True)
class Ended:
    """How a run on local workers has ended."""

    code: int  # 0 if complete, ddp.preempted_exit_code, or 128 + n if signal n ended it otherwise
    signalled: bool  # True if this process received a signal, perhaps too late for the run
    error: UserError | None = None  # the first error that a worker has reported


async def run_workers(
    launch: Launch, env: DistEnv, started_at: float, forwarder: SignalForwarder
) -> Ended:
    """Start the workers of a run; wait until they have trained, and restart them when one dies.

    Args:
        env: the ranks of the first worker.
        started_at: time.monotonic() when this run began.
        forwarder: installed.

    Raises:
        ConfigError: WORLD_SIZE is too small for the workers.
        RunError: the store cannot be hosted at MASTER_ADDR:MASTER_PORT.
    """
    ddp = launch.job.config.ddp
    n = ddp.ranks_here
    if not env.is_rank_zero:
        logs.to_console(DistEnv())
        log.info("starting %d local workers; rank 0 runs at %s:%d", n, *env.master_address)
    world_size = n if env.is_standalone else env.world_size
    if env.rank + n > world_size:
        raise ConfigError(
            f"RANK={env.rank} and ddp.nproc_per_node={n} need WORLD_SIZE={env.rank + n} or more"
        )
    make_socket_directory()  # the workers use it too, and do not delete it
    if ddp.launcher == "forkserver":
        start_server()
    first = replace(env, world_size=world_size, has_agent=True)
    if env.is_rank_zero and not env.is_standalone:
        await asyncio.to_thread(_host_store, env, ddp.timeout_s)
    group = _WorkerGroup(launch, first, forwarder)
    try:
        code, interrupted = await run_with_restarts(
            group.run, started_at, ddp, launch.job.directory
        )
    finally:
        group.store.stop()
    if code and env.is_rank_zero and not env.is_standalone:
        await asyncio.sleep(STORE_LINGER_S)
    return Ended(code, interrupted, group.error)


def _host_store(env: DistEnv, timeout_s: float) -> None:
    """Host a store at MASTER_ADDR:MASTER_PORT for the lifetime of this process.

    This imports torch, as the fork server does meanwhile.
    """
    from mingpt_ddp.process.job_store import open_store

    open_store(env, 0, timeout_s)


async def run_with_restarts(
    attempt: Callable[[float], Awaitable[tuple[int, int]]],
    started_at: float,
    ddp: DDPConfig,
    directory: Path,
) -> tuple[int, bool]:
    """Call `attempt`, with its start time, until it succeeds or a restart would not help.

    Args:
        attempt: returns the same as `_WorkerGroup.run`.

    Returns:
        The exit code, and whether a signal was received, as in `Ended`.
    """
    before = read_result(directory)
    for restart in range(ddp.max_restarts + 1):
        if restart:
            log.warning("restart %d of %d", restart, ddp.max_restarts)
        code, received = await attempt(started_at)
        started_at = time.monotonic()
        if received:
            result = read_result(directory)
            if result.get("status") == RunStatus.PREEMPTED:
                return ddp.preempted_exit_code, True
            is_complete = result and result != before
            return 0 if is_complete else 128 + received, True
        if code in (0, USER_ERROR, ddp.preempted_exit_code):
            return code, False
    return USER_ERROR if code == EX_TEMPFAIL else FAILURE, False


class _WorkerGroup:
    """Start the workers of a run once, and wait for all.

    Launchers on other nodes may start further ranks.
    """

    def __init__(self, launch: Launch, first: DistEnv, forwarder: SignalForwarder) -> None:
        """
        Args:
            first: the ranks of the first worker.
        """
        self.launch = launch
        self.config = launch.job.config
        self.first = first
        self.forwarder = forwarder
        self.store = LocalStore(self.config.ddp.launcher)  # if all workers are on this machine
        self.error: UserError | None = None

    async def run(self, started_at: float) -> tuple[int, int]:
        """Start the workers, at time.monotonic() `started_at`, and wait until all have exited.

        Returns:
            The exit code of the first worker that failed, -n if signal n killed it, else 0 or
            ddp.preempted_exit_code; and the signal that this process received, or 0.
        """
        config = self.config
        preempted_code = config.ddp.preempted_exit_code
        uses_server = config.ddp.launcher == "forkserver"
        if uses_server:
            start_server()  # starts it again if it has died
        server = server_pid()
        grace_s = config.snapshot.grace_seconds + EXIT_MARGIN_S
        failed = ""
        watch = ProcessWatch(self.forwarder, config.ddp.timeout_s, grace_s)
        with watch, Channels(self.launch.pruner, self.launch.slot is None) as channels:
            try:
                watch.workers = self._workers(channels, started_at)
                with self.forwarder.started(watch.workers):
                    joined = join_workers(
                        watch.workers, grace_s, preempted_code, self.store.process
                    )
                    code, failed = await channels.serve(joined, watch.workers)
            except (EOFError, ConnectionError):  # the fork server died before it had forked all
                code = SERVER_DIED
            self.error = channels.error()
        # The result of a run tells whether a signal ended it, but other nodes may not see
        # result.json.
        can_tell = code not in (0, preempted_code) or self.first.is_standalone
        received = self.forwarder.received
        number = received[-1] if received and can_tell else 0
        if code == -number < 0:  # the workers did not handle it yet
            log.error("ended by %s; rerun the same command", signal.Signals(number).name)
        is_own_code = code in (0, FAILURE, USER_ERROR, EX_TEMPFAIL, preempted_code) or code > 128
        if not is_own_code and not number:  # the worker could not log this itself
            how = f"exited with code {code}: its code, or a library, has called exit()"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            self.error = UserError(f"{failed} {how}")
            if self.launch.slot is None:  # else the sweep names the job too
                log.error("%s", self.error)
        if code == SERVER_DIED and uses_server:
            if server == server_pid():  # else another job has started one
                stop_server()
            if not number:
                log.error("error: the fork server of the workers was killed")
        return code, number

    def _workers(self, channels: Channels, started_at: float) -> list[BaseProcess]:
        """Return the workers, not started yet; start their store, if all are on this machine."""
        first = self.first
        if first.is_standalone:
            self.store.ensure_running()
            first = replace(first, master_address=("localhost", self.store.port))
        launch = self.launch
        ddp = self.config.ddp
        n = ddp.ranks_here
        context: Any = multiprocessing.get_context(ddp.launcher)
        threads = canonical_threads(ddp) or launch.threads
        shared = shared_environ(n, first.is_standalone, threads)
        shared[STARTED_AT] = str(started_at)
        if launch.slot:
            shared.update(launch.slot.environ())
        parent = (ddp.launcher == "forkserver" and server_pid()) or os.getpid()
        job = replace(launch.job, place=None).to_json()
        workers = []
        for index in range(n):
            environ = {**shared, **worker_environ(first, index, n)}
            ends = channels.for_worker(index)
            arguments = (parent, environ, job, ends)
            name = f"rank {first.rank + index}"
            workers.append(context.Process(target=run_worker, args=arguments, name=name))
        return workers
