"""Start the workers of a run, wait for them, and restart all of them if one dies.

The functions are coroutines, so that one process can run several jobs of a sweep concurrently.
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
# multiprocessing reports this exit code for a worker whose fork server has died.
SERVER_DIED = 255
# After a failure, the other workers may take this much longer than the grace period to exit.
EXIT_MARGIN_S = 5.0


@dataclass(frozen=True)
class Launch:
    """A job to train on local workers."""

    job: Job
    pruner: PrunerCallback | None = None  # called with each evaluation; None outside of a search
    # Share of the machine for one of several concurrent jobs. None if the job has the whole
    # machine, and writes to the console.
    slot: Slot | None = None
    threads: int | None = None  # threads of each worker; None for an equal share of the cores


@dataclass(frozen=True)
class Ended:
    """How a run on local workers has ended."""

    # Exit code, for example 0 after a complete run, ddp.preempted_exit_code after a preemption, or
    # 128 + n if signal n has ended the run before it could save.
    code: int
    signalled: bool  # True if this process has received a signal, even if the run was complete then
    error: UserError | None = None  # the first error that a worker has reported


async def run_workers(
    launch: Launch, env: DistEnv, started_at: float, forwarder: SignalForwarder
) -> Ended:
    """Start the workers of a run, and wait until they have trained. Restart them if one dies.

    Args:
        launch: The job, and how to run it.
        env: Rank, world size and store of the first worker.
        started_at: The time.monotonic() at which this run began.
        forwarder: Forwards signals to the workers. Its signal handlers are installed.

    Raises:
        ConfigError: WORLD_SIZE is too small for the workers.
        RunError: The store cannot be hosted at MASTER_ADDR:MASTER_PORT.
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
    make_socket_directory()  # the workers use it too, but do not delete it
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

    This imports torch, which takes seconds. The fork server imports it at the same time.
    """
    from mingpt_ddp.process.job_store import open_store

    open_store(env, 0, timeout_s)


async def run_with_restarts(
    attempt: Callable[[float], Awaitable[tuple[int, int]]],
    started_at: float,
    ddp: DDPConfig,
    directory: Path,
) -> tuple[int, bool]:
    """Call `attempt` until it succeeds, or until a restart would not help.

    Args:
        attempt: Runs the workers once, as `_WorkerGroup.run` does. Receives its start time.
        started_at: The time.monotonic() at which the first attempt began.
        ddp: Settings with the number of restarts.
        directory: Run directory, with the result of the run.

    Returns:
        The exit code, and True if this process has received a signal, as in `Ended`.
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
    """The workers of a run on this machine. Launchers on other nodes may start further ranks."""

    def __init__(self, launch: Launch, first: DistEnv, forwarder: SignalForwarder) -> None:
        """
        Args:
            first: Rank, world size and store of the first worker.
        """
        self.launch = launch
        self.config = launch.job.config
        self.first = first
        self.forwarder = forwarder
        self.store = LocalStore(self.config.ddp.launcher)  # runs if all ranks are on this machine
        self.error: UserError | None = None  # first error of a worker in the latest attempt

    async def run(self, started_at: float) -> tuple[int, int]:
        """Start the workers, and wait until all of them have exited.

        Args:
            started_at: The time.monotonic() at which this attempt began.

        Returns:
            The exit code of the attempt, and the number of the signal that this process received.
            The exit code is the code of the first worker that failed, which is -n if signal n
            killed it. If none failed, it is 0 or ddp.preempted_exit_code. Without a signal, the
            second number is 0.
        """
        config = self.config
        preempted_code = config.ddp.preempted_exit_code
        uses_server = config.ddp.launcher == "forkserver"
        if uses_server:
            start_server()  # it may have died in an earlier attempt
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
            except (EOFError, ConnectionError):  # the fork server died before it forked all workers
                code = SERVER_DIED
            self.error = channels.error()
        # If no worker has failed, the caller reads in result.json whether the signal has ended the
        # run. With several nodes, this node may not see that file. Then do not report the signal.
        can_tell = code not in (0, preempted_code) or self.first.is_standalone
        received = self.forwarder.received
        number = received[-1] if received and can_tell else 0
        if code == -number < 0:  # the signal came before the workers could handle it
            log.error(
                "the run was ended by %s; rerun the same command", signal.Signals(number).name
            )
        is_own_code = code in (0, FAILURE, USER_ERROR, EX_TEMPFAIL, preempted_code) or code > 128
        if not is_own_code and not number:  # the worker could not log this itself
            how = f"exited with code {code}, because your code or a library called exit()"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            self.error = UserError(f"{failed} {how}")
            if self.launch.slot is None:  # otherwise the sweep logs the error with the job's name
                log.error("%s", self.error)
        if code == SERVER_DIED and uses_server:
            if server == server_pid():  # otherwise another job has already started a new server
                stop_server()
            if not number:
                log.error("error: the fork server, which starts the workers, was killed")
        return code, number

    def _workers(self, channels: Channels, started_at: float) -> list[BaseProcess]:
        """Create the workers without starting them. Start their store if this machine hosts it."""
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
