"""Start one worker per local rank, wait for them, start them again when they die: `ddp.nproc_per_node`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.env import DistEnv, local_agent_env, worker_environ
from mingpt_ddp.distributed.exit import EX_TEMPFAIL, FAILURE, USER_ERROR
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_dir import RunStatus, read_result

log = logging.getLogger(__name__)

# What an agent hands on to its workers.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
STORE_LINGER_S = 3.0  # for which the store of a run on several machines stays, so that all can learn what went wrong


@dataclass(frozen=True)
class WorkerExit:
    """How the workers ended."""

    code: int = 0  # the exit code of the first that failed, negative for the signal that ended it; 0: none has
    rank: int = 0  # which one that was
    signal: int = 0  # that this process was sent meanwhile


def train_on_workers(
    config: Config, env: DistEnv, directory: Path, words: Sequence[str], main: Callable[[], None]
) -> tuple[int, bool]:
    """Be the parent of `ddp.nproc_per_node` workers until they have trained.

    Args:
        place: of the first of them.
        directory: the run's.
        words: the command line that composes `config`.
        main: what each of them runs.

    Returns:
        The exit code: 0 after a complete or preempted run, 128 + n where signal n ended it otherwise; and whether this
        process was told to end, perhaps too late for the run.

    Raises:
        ConfigError: this machine or this batch cannot have so many ranks.
    """
    from mingpt_ddp.distributed.runtime import choose_device

    n = config.ddp.nproc_per_node or 0
    is_manual = not env.is_standalone
    world_size = env.world_size if is_manual else n
    if env.rank + n > world_size:
        raise ConfigError(f"RANK={env.rank} and ddp.nproc_per_node={n} need WORLD_SIZE={env.rank + n} or more")
    choose_device(config.trainer, config.ddp, DistEnv(local_rank=n - 1, shares_devices=True))
    plan_batches(config.trainer, world_size)
    start = _spawn if is_manual or config.ddp.launcher == "spawn" else _elastic
    with _environment(n, local=env.is_standalone):
        code, told = _run_with_restarts(lambda: start(config, env, words, main), config.ddp.max_restarts, directory)
        if is_manual and env.is_rank_zero and code:
            time.sleep(STORE_LINGER_S)
    return code, told


def _run_with_restarts(attempt: Callable[[], WorkerExit], max_restarts: int, directory: Path) -> tuple[int, bool]:
    """As `train_on_workers`, after restarts where there is hope."""
    before = read_result(directory)
    for restart in range(max_restarts + 1):
        if restart:
            log.warning("restart %d of %d", restart, max_restarts)
        ending = attempt()
        if ending.signal:
            result = read_result(directory)
            saved = result.get("status") == RunStatus.PREEMPTED or (result and result != before)
            return 0 if saved else 128 + ending.signal, True
        if ending.code < 0:  # it could not tell itself
            log.error("error: rank %d was ended by %s", ending.rank, signal.Signals(-ending.code).name)
        if ending.code in (0, USER_ERROR):  # an error of the user's would come again
            return ending.code, False
    return USER_ERROR if ending.code == EX_TEMPFAIL else FAILURE, False


@contextlib.contextmanager
def _environment(workers: int, local: bool) -> Iterator[None]:
    """The variables that workers inherit, and afterwards what was there before; local: all are on this machine."""
    before = dict(os.environ)
    if local:  # gloo and NCCL would listen on the address of the host name, which other machines can reach
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    package_home = str(Path(__file__).resolve().parents[2])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no screenful of addresses in torch when a store has gone
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_home, before.get("PYTHONPATH")]))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _elastic(config: Config, env: DistEnv, words: Sequence[str], main: Callable[[], None]) -> WorkerExit:
    """One attempt under torch's elastic agent; restarts are ours, so that an error of the user's is final.

    The rendezvous is torch's "static", for which one node needs no state; its "c10d" unpickles what stands in the
    store. It opens a multi-tenant store at the port of ours, and so takes our server, which listens on loopback only.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mingpt_ddp.distributed.rendezvous import loopback_store

    for name in list(logging.root.manager.loggerDict):  # the workers tell what went wrong
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    n = config.ddp.nproc_per_node or 0
    store = loopback_store()
    launch = LaunchConfig(1, 1, n, run_id="none", rdzv_backend="static", rdzv_endpoint=f"localhost:{store.port}")
    launch.rdzv_configs["rank"] = 0
    launch.max_restarts = 0
    launch.signals_to_handle = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    launch.shutdown_timeout = round(config.snapshot.grace_seconds) + 5  # seconds; older versions of torch have 30
    try:
        elastic_launch(launch, sys.executable)("-m", "mingpt_ddp", *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return WorkerExit(failure.exitcode, rank)
    except SignalException as stop:
        return WorkerExit(signal=stop.sigval)
    return WorkerExit()


def _spawn(config: Config, env: DistEnv, words: Sequence[str], main: Callable[[], None]) -> WorkerExit:
    """One attempt of processes started by torch.multiprocessing, which may be a part of the ranks only."""
    from torch import multiprocessing

    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)  # the workers tell what went wrong
    n = config.ddp.nproc_per_node or 0
    first, store = _with_store(config, env)
    variables = [worker_environ(first, index, n) for index in range(n)]
    got = 0

    def forward_signal(number: int, frame: FrameType | None) -> None:
        nonlocal got
        got = number
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, number)

    for number in SIGNALS:
        signal.signal(number, forward_signal)
    arguments = (os.getpid(), variables, list(words), main)
    started = multiprocessing.start_processes(_worker, arguments, nprocs=n, join=False, start_method="spawn")
    if got:  # some were not there yet
        forward_signal(got, None)
    try:
        while not started.join():
            pass
    except multiprocessing.ProcessExitedException as failure:
        return WorkerExit(failure.exit_code, env.rank + failure.error_index, got)
    except multiprocessing.ProcessRaisedException as failure:
        return WorkerExit(FAILURE, env.rank + failure.error_index, got)
    finally:
        del store  # it lasts as long as the attempt
    return WorkerExit(signal=got if env.is_standalone else 0)  # not every machine can read the run's result


def _with_store(config: Config, env: DistEnv) -> tuple[DistEnv, Any]:
    """The place of the first worker, and the store for its attempt if this process is the only parent.

    With parents on several machines the first of them has a store that outlives attempts: they end at different times.
    """
    from mingpt_ddp.distributed.rendezvous import connect, loopback_store

    if env.is_standalone:
        store = loopback_store()
        return local_agent_env(store.port, config.ddp.nproc_per_node or 0), store
    if env.is_rank_zero:
        connect(env, 0, config.ddp.timeout_s)
    return replace(env, has_agent=True), None


def _worker(
    index: int, parent: int, variables: list[dict[str, str]], words: list[str], main: Callable[[], None]
) -> None:
    if os.getppid() != parent:  # it died while this one was imported
        os._exit(FAILURE)
    os.setsid()  # Ctrl-C on the terminal comes once, through the parent
    os.environ.update(variables[index])
    sys.argv = [sys.argv[0], *words]
    main()
