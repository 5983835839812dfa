"""A client of the job's key-value store, hosted by torchrun's agent, the launcher or rank zero.

The agent (or the launcher) starts all ranks again after a failure. Each such start is an attempt.
"""

import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from mingpt_ddp.errors import RunError
from mingpt_ddp.process.env import DistEnv

T = TypeVar("T")
POLL_S = 0.005
STORE_TIMEOUT_S = 5.0  # timeout of one response of the store on a busy machine
FATAL = "fatal"  # key in the store: an error that every attempt would repeat


def open_store(env: DistEnv, job: int, timeout_s: float) -> Store:
    """Return a client of the job's key-value store. Rank 0 hosts it unless an elastic agent does.

    Args:
        job: Index of the job in a sweep. Every job has its own keys.

    Raises:
        RunError: The host does not respond within `timeout_s` seconds.
    """
    host, port = env.master_address
    timeout = timedelta(seconds=timeout_s)
    try:
        if env.is_rank_zero and not env.has_agent:
            store = _host(host, port)
            store.set_timeout(timeout)
        else:
            _wait_for_host(host, port, timeout_s)
            store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"mingpt_ddp/{job}", store)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"rank {env.rank} cannot reach MASTER_ADDR:MASTER_PORT {host}:{port}: {reason}; check "
            "both variables, and that rank 0 is running"
        ) from error


def _wait_for_host(host: str, port: int, timeout_s: float) -> None:
    """Wait until the store listens. Torch's own client would log warnings while it waits."""
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


# All jobs share one store: other ranks may connect for the next job while this rank ends the last.
@cache
def _host(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


def call_with_timeout(work: Callable[[], T], timeout_s: float) -> T:
    """Call `work` on a thread of its own, and return its result within a timeout.

    A call of the store raises an error if the host has died. It never returns if the network is
    broken or the host is stopped.

    Raises:
        TimeoutError: `work` has not returned after `timeout_s` seconds.
        Exception: Any exception of `work`.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again by the caller
            outcome.set_exception(error)

    threading.Thread(target=call, name="store", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except concurrent.futures.TimeoutError as error:  # another class in Python 3.10
        raise TimeoutError from error


def ask_store(work: Callable[[], T], otherwise: T, wait_s: float = 0.0) -> T:
    """Return the result of `work`, or `otherwise` if it raises or takes too long.

    The timeout is STORE_TIMEOUT_S + `wait_s` seconds.
    """
    try:
        return call_with_timeout(work, STORE_TIMEOUT_S + wait_s)
    except Exception:
        return otherwise


def record_fatal(env: DistEnv, job: int, message: str) -> bool:
    """Record a fatal error for later attempts. Return True if this rank should print it.

    This is the rank that is the first of its agent to record an error. Each agent has its own
    console.
    """
    store = open_store(env, job, STORE_TIMEOUT_S)
    store.set(FATAL, message)
    return store.add(f"reported/{socket.gethostname()}/{os.getppid()}", 1) == 1


def raise_if_fatal(store: Store) -> None:
    """Fail if an earlier attempt recorded a fatal error, because agents restart workers anyway.

    Raises:
        RunError: The recorded error.
    """
    if store.check([FATAL]):
        raise RunError(get_now(store, FATAL).partition(": ")[2])  # RunError adds `run error: `


def get_now(store: Store, key: str) -> str:
    """Return the value of a key, or an empty string if it has none yet."""
    if not store.check([key]):
        return ""
    return store.get(key).decode()
