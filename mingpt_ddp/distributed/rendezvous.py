"""How the ranks of one attempt find each other in a key-value store.

The launcher's store outlives the workers: after a restart it still holds the addresses of dead processes. Therefore
every process writes a fresh id. Rank 0 proposes an attempt with one id per rank, each rank whose id is in it confirms,
and when all have confirmed rank 0 starts the attempt. The keys of its process group begin with rank 0's id, which no
other attempt has.
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
POLL_S = 0.02
STORE_TIMEOUT_S = 5.0  # for one answer of the store on a busy machine
FATAL = "fatal"  # key in the store: an error that every attempt would hit again


def connect(env: DistEnv, job: int, timeout_s: float) -> Store:
    """Return a client of the job's key-value store; rank 0 hosts it unless an elastic agent does.

    Args:
        job: index of the job in a sweep; every job has its own keys.

    Raises:
        RunError: nobody answers within `timeout_s` seconds.
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
        raise RunError(f"rank {env.rank} cannot reach MASTER_ADDR:MASTER_PORT {host}:{port}: {reason}") from error


def _wait_for_host(host: str, port: int, timeout_s: float) -> None:
    """Wait until the store listens; torch's own client fills the screen with warnings meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), max(POLL_S, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


@cache  # it lives as long as the process: other ranks may ask for the next job before this one has left the last
def _host(host: str, port: int, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def loopback_store() -> TCPStore:
    """Host a store for local workers: on a free port, reachable from this machine only.

    By itself a TCPStore listens on all interfaces.
    """
    family, *_, address = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)[0]  # as a client resolves it
    listener = socket.create_server((str(address[0]), 0), family=family)
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def ask_store(work: Callable[[], T], otherwise: T, wait_s: float = 0.0) -> T:
    """Return what `work` returns; `otherwise` if it raises, or takes longer than STORE_TIMEOUT_S + `wait_s` seconds.

    A store behind a broken network neither answers nor gives up, and one whose host has died raises.
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
    """Record an error that every attempt would hit again; whether this is the first worker of its parent to do so."""
    store = connect(env, job, STORE_TIMEOUT_S)
    store.set(FATAL, message)
    parent = f"{socket.gethostname()}/{os.getppid()}"  # each parent has a console of its own
    return store.add(f"reported/{parent}", 1) == 1


def raise_if_fatal(store: Store) -> None:
    """Fail at once if an earlier attempt hit an error that would repeat: an agent restarts its workers anyway.

    Raises:
        RunError: that error.
    """
    if store.check([FATAL]):
        raise RunError(_get(store, FATAL).partition(": ")[2])  # its class adds what kind of error it is


def join_attempt(store: Store, env: DistEnv, timeout_s: float) -> Store:
    """Wait for the other ranks of this attempt; return a store for them alone.

    Raises:
        RunError: a rank did not appear within `timeout_s` seconds.
    """
    own_id, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{env.rank}", own_id)
    attempt = (_propose if env.is_rank_zero else _confirm)(store, env, own_id, deadline)
    return PrefixStore(f"attempt/{attempt}", store)


def _propose(store: Store, env: DistEnv, own_id: str, deadline: float) -> str:
    """On rank 0, propose the current ids until all ranks have confirmed the same ones."""
    others = range(1, env.world_size)
    while True:
        ids = [_get(store, f"hello/{rank}") for rank in others]
        missing = [rank for rank, other_id in zip(others, ids, strict=True) if not other_id]
        if not missing:
            proposal = ",".join([own_id, *ids])
            store.set("proposal", proposal)
            missing = [rank for rank in others if _get(store, f"confirm/{rank}") != proposal]
            if not missing:
                store.set("go", proposal)
                return own_id
        absent = ", ".join(map(str, missing))
        _pause(store, 0, own_id, deadline, f"rank {absent} did not appear in time; start all ranks")


def _confirm(store: Store, env: DistEnv, own_id: str, deadline: float) -> str:
    """On any other rank, confirm every proposal with this process's id; return rank 0's id when it starts one."""
    while True:
        proposal = _get(store, "proposal")
        ids = proposal.split(",")
        if own_id in ids:
            store.set(f"confirm/{env.rank}", proposal)
            if _get(store, "go") == proposal:
                return ids[0]
        message = f"rank {env.rank} waited, but the ranks did not all appear in time; start them"
        _pause(store, env.rank, own_id, deadline, message)


def _get(store: Store, key: str) -> str:
    """Return the value of a key, or an empty string if it has none yet."""
    return store.get(key).decode() if store.check([key]) else ""


def _pause(store: Store, rank: int, own_id: str, deadline: float, message: str) -> None:
    """Sleep for a moment; raise if the time is over or another rank has reported a fatal error."""
    raise_if_fatal(store)
    if time.monotonic() > deadline:
        if _get(store, f"hello/{rank}") != own_id:  # not earlier: it may be the successor of this process, cut off
            raise RunError(f"another process has RANK={rank} too; give every process a rank of its own")
        raise RunError(f"{message}, or give them longer with ddp.timeout_s")
    time.sleep(POLL_S)
