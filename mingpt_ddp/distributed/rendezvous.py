"""How the ranks of one attempt find each other.

A launcher's store outlives the workers: after a restart it still holds the addresses of the dead. So every process
brings a fresh id, rank 0 gathers one id per rank and proposes them as an attempt, and the attempt begins when every
rank has found its own id in it. Its process group lives below a prefix of its own.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar, cast

from torch.distributed import PrefixStore, Store, TCPStore

from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import RunError

T = TypeVar("T")
POLL_S = 0.02
FATAL = "fatal"


def connect(env: DistEnv, job: int, timeout_s: float) -> Store:
    """A client of the job's key-value store; rank 0 hosts it where no elastic agent does.

    Args:
        job: the number of the job in a sweep; each has keys of its own.

    Raises:
        RunError: nobody answers within `timeout_s` seconds.
    """
    host, port = env.master_address
    hosts_it = env.is_rank_zero and not env.has_agent
    try:
        timeout = timedelta(seconds=timeout_s)
        if not hosts_it:
            _await_host(host, port, timeout_s)
        store = (
            _host(host, port, timeout) if hosts_it else TCPStore(host, port, timeout=timeout, wait_for_workers=False)
        )
        store.set_timeout(timeout)
        return PrefixStore(f"mingpt_ddp/{job}", store)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"rank {env.rank} cannot reach MASTER_ADDR:MASTER_PORT {host}:{port}: {reason}") from error


def _await_host(host: str, port: int, timeout_s: float) -> None:
    """torch's own client fills the screen while it waits for a store that is not there yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), max(POLL_S, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


@cache
def _host(host: str, port: int, timeout: timedelta) -> TCPStore:
    """It lives as long as the process: other ranks may ask for the next job before this one has left the last."""
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def loopback_store() -> TCPStore:
    """Start a store for local workers: on a free port, reachable from this machine only.

    By itself a TCPStore listens on all interfaces. Another `TCPStore(..., is_master=True, multi_tenant=True)` of this
    process with the same port shares its server.
    """
    family, *_, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]  # as a client resolves it
    listener = socket.create_server((str(address[0]), 0), family=family)
    return TCPStore(
        "localhost",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def call_with_timeout(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` returns; behind a cut cable a store does not answer, and does not give up either.

    Raises:
        TimeoutError: it took longer than `limit_s` seconds.
        Exception: what `work` raised.
    """
    answers: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue()

    def ask() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:  # raised where the answer is waited for
            answers.put((None, error))

    threading.Thread(target=ask, name="store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s} s") from None
    if error is not None:
        raise error
    return cast(T, answer)


def claim_error_report(store: Store, message: str, parent: str) -> bool:
    """Whether this is the first rank and attempt below a parent to tell of an error that every attempt would meet."""
    store.set(FATAL, message)
    return store.add(f"told/{parent}", 1) == 1


def raise_if_fatal(store: Store) -> None:
    """An agent restarts its workers whatever they died of; after an error that all attempts would meet, leave at once.

    Raises:
        RunError: what the earlier attempt told.
    """
    if store.check([FATAL]):
        raise RunError(_get_or_empty(store, FATAL).partition(": ")[2])  # it says what kind of error it is itself


def join_attempt(store: Store, env: DistEnv, timeout_s: float) -> Store:
    """Wait for the other ranks of this attempt; the store returned is theirs alone.

    Raises:
        RunError: a rank did not appear within `timeout_s` seconds.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    attempt = (
        _coordinate(store, env, own, deadline) if env.is_rank_zero else _participate(store, env.rank, own, deadline)
    )
    return PrefixStore(f"attempt/{attempt}", store)


def _coordinate(store: Store, env: DistEnv, own: str, deadline: float) -> str:
    """Rank 0: propose the ids at hand again and again until every rank has confirmed one and the same proposal."""
    store.set("hello/0", own)
    others = range(1, env.world_size)
    proposed: dict[str, str] = {}
    attempt = ""
    while True:
        ids = {str(rank): _get_or_empty(store, f"hello/{rank}") for rank in others}
        if all(ids.values()) and ids != proposed:
            attempt, proposed = uuid.uuid4().hex, ids
            store.set("attempt", json.dumps({"attempt": attempt, "ids": ids}))
        confirmed = [rank for rank in others if attempt and _get_or_empty(store, f"confirm/{attempt}/{rank}")]
        if len(confirmed) == len(others):
            store.set(f"go/{attempt}", "1")
            return attempt
        absent = [rank for rank in others if not ids[str(rank)]] or sorted(set(others) - set(confirmed))
        _pause(store, 0, own, deadline, f"rank {', '.join(map(str, absent))} did not appear in time; start all ranks")


def _participate(store: Store, rank: int, own: str, deadline: float) -> str:
    """Any other rank: confirm every proposal that holds the own id; the one that rank 0 starts is the attempt."""
    store.set(f"hello/{rank}", own)
    while True:
        proposal = json.loads(_get_or_empty(store, "attempt") or "{}")
        if proposal and proposal["ids"].get(str(rank)) == own:
            attempt: str = proposal["attempt"]
            store.set(f"confirm/{attempt}/{rank}", "1")
            if _get_or_empty(store, f"go/{attempt}"):
                return attempt
        _pause(store, rank, own, deadline, f"rank {rank} waited, but the ranks did not all appear in time; start them")


def _get_or_empty(store: Store, key: str) -> str:
    """The value of a key, or an empty string where it has none yet."""
    return store.get(key).decode() if store.check([key]) else ""


def _pause(store: Store, rank: int, own: str, deadline: float, complaint: str) -> None:
    """Wait for a moment, unless the time is over or another rank has told what stops all of them."""
    raise_if_fatal(store)
    if time.monotonic() > deadline:
        if _get_or_empty(store, f"hello/{rank}") != own:  # not before: a process cut off may find its successor here
            raise RunError(f"another process has RANK={rank} too; give every process a rank of its own")
        raise RunError(f"{complaint}, or give them longer with ddp.timeout_s")
    time.sleep(POLL_S)
