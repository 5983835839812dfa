"""The rendezvous: how the ranks of one attempt find each other in a key-value store.

The launcher's store outlives the workers: after a restart it still holds the addresses of dead
processes. Therefore every process writes a fresh id. Rank 0 proposes an attempt with one id per
rank, each rank whose id is in it confirms, and once all have confirmed rank 0 starts the attempt.
The keys of its process group are prefixed with rank 0's id, which is unique to the attempt.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import RunError

T = TypeVar("T")
POLL_S = 0.005
STORE_TIMEOUT_S = 5.0  # for one response of the store on a busy machine
FATAL = "fatal"  # key in the store: an error that every attempt would repeat


def connect(env: DistEnv, job: int, timeout_s: float) -> Store:
    """Return a client of the job's key-value store; rank 0 hosts it unless an elastic agent does.

    Args:
        job: index of the job in a sweep; every job has its own keys.

    Raises:
        RunError: the host does not respond within `timeout_s` seconds.
    """
    host, port = env.master_address
    timeout = timedelta(seconds=timeout_s)
    try:
        if env.is_rank_zero and not env.has_agent:
            store = _host(host, port, timeout)
        else:
            _wait_for_host(host, port, timeout_s)
            store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"mingpt_ddp/{job}", store)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"rank {env.rank} cannot reach MASTER_ADDR:MASTER_PORT {host}:{port}: {reason}"
        ) from error


def _wait_for_host(host: str, port: int, timeout_s: float) -> None:
    """Wait until the store listens; torch's own client would log warnings while waiting."""
    deadline = time.monotonic() + timeout_s
    while True:
        remaining_s = max(POLL_S, deadline - time.monotonic())
        try:
            socket.create_connection((host, port), remaining_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


@cache  # per process: other ranks may connect for the next job while this rank finishes the last
def _host(host: str, port: int, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def loopback_store(listener: socket.socket) -> TCPStore:
    """Host a store for local workers on a socket of the loopback interface.

    By default a TCPStore listens on all interfaces.
    """
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def ask_store(work: Callable[[], T], otherwise: T, wait_s: float = 0.0) -> T:
    """Return what `work` returns; `otherwise` if it raises or takes too long.

    That is STORE_TIMEOUT_S + `wait_s` seconds. On a broken network a store call never returns; if
    the host died, it raises.
    """
    answers: list[T] = []

    def call() -> None:
        with contextlib.suppress(Exception):
            answers.append(work())

    thread = threading.Thread(target=call, name="store", daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT_S + wait_s)
    return answers[0] if answers else otherwise


def claim_error_report(env: DistEnv, job: int, message: str) -> bool:
    """Record a fatal error for later attempts.

    Return whether this is the first worker of its parent to do so.
    """
    store = connect(env, job, STORE_TIMEOUT_S)
    store.set(FATAL, message)
    parent = f"{socket.gethostname()}/{os.getppid()}"  # each parent has its own console
    return store.add(f"reported/{parent}", 1) == 1


def raise_if_fatal(store: Store) -> None:
    """Fail if an earlier attempt recorded a fatal error: the agent restarts its workers regardless.

    Raises:
        RunError: the recorded error.
    """
    if store.check([FATAL]):
        raise RunError(get_now(store, FATAL).partition(": ")[2])  # RunError adds the kind


def join_attempt(store: Store, env: DistEnv, timeout_s: float) -> Store:
    """Wait for the other ranks of this attempt; return a store with a prefix for it.

    Raises:
        RunError: a rank did not join within `timeout_s` seconds.
    """
    own_id = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    store.set(f"hello/{env.rank}", own_id)
    while True:
        problem = f"rank {env.rank} waited, but not all ranks joined"
        if env.is_rank_zero:
            problem = f"rank {_propose(store, own_id, env.world_size)} did not join"
        proposal = get_now(store, "proposal")
        ids = proposal.split(",")
        if own_id in ids:
            store.set(f"confirm/{env.rank}", proposal)
            if get_now(store, "go") == proposal:
                return PrefixStore(f"attempt/{ids[0]}", store)
        raise_if_fatal(store)
        if time.monotonic() > deadline:
            # Asked only now: before, it may be the successor of this process.
            if get_now(store, f"hello/{env.rank}") != own_id:
                raise RunError(
                    f"another process also has RANK={env.rank}; give every process its own rank"
                )
            raise RunError(f"{problem} in time; start all ranks, or raise ddp.timeout_s")
        time.sleep(POLL_S)


def _propose(store: Store, own_id: str, world_size: int) -> str:
    """On rank 0, propose the current ids; start the attempt once all other ranks confirm them.

    Returns:
        The ranks that have not, as text.
    """
    others = range(1, world_size)
    ids = [get_now(store, f"hello/{rank}") for rank in others]
    missing = [rank for rank, other_id in zip(others, ids, strict=True) if not other_id]
    if not missing:
        proposal = ",".join([own_id, *ids])
        store.set("proposal", proposal)
        missing = [rank for rank in others if get_now(store, f"confirm/{rank}") != proposal]
        if not missing:
            store.set("go", proposal)
    return ", ".join(map(str, missing))


def get_now(store: Store, key: str) -> str:
    """Return the value of a key, or an empty string if it has none yet."""
    if not store.check([key]):
        return ""
    return store.get(key).decode()
