"""Start the workers of `ddp.nproc_per_node`, wait for them, and restart them when one dies."""

import contextlib
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from mingpt_ddp.config.config import Config
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.device import choose_device
from mingpt_ddp.distributed.env import DistEnv, worker_environ
from mingpt_ddp.distributed.exit import EX_TEMPFAIL, FAILURE, USER_ERROR, exit_process
from mingpt_ddp.distributed.rendezvous import connect, loopback_store
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.run_dir import RunStatus, read_result

log = logging.getLogger(__name__)

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
STORE_LINGER_S = 3.0  # for which the first parent keeps its store after a failure, so that others can read the reason


@dataclass(frozen=True)
class WorkerExit:
    """How the workers ended."""

    code: int = 0  # the exit code of the first worker that failed, -n if signal n killed it; 0: none has failed
    rank: int = 0  # of that worker
    signal: int = 0  # that this process received meanwhile


def train_on_workers(config: Config, env: DistEnv, directory: Path, overrides: list[str]) -> tuple[int, bool]:
    """Start `ddp.nproc_per_node` workers and wait until they have trained.

    Args:
        env: the ranks of the first worker.
        directory: the run's.
        overrides: the command line that composes `config`.

    Returns:
        The exit code: 0 after a complete or preempted run, 128 + n where signal n ended it otherwise; and whether this
        process has received a signal, perhaps too late for the run.

    Raises:
        ConfigError: this machine or this batch cannot have so many ranks.
    """
    n = config.ddp.nproc_per_node or 0
    if not env.is_rank_zero:
        logs.to_console(DistEnv())
        log.info("starting %d local workers; rank 0 runs at %s:%d", n, *env.master_address)
    world_size = n if env.is_standalone else env.world_size
    if env.rank + n > world_size:
        raise ConfigError(f"RANK={env.rank} and ddp.nproc_per_node={n} need WORLD_SIZE={env.rank + n} or more")
    choose_device(config.trainer, config.ddp, DistEnv(local_rank=n - 1, shares_devices=True))
    plan_batches(config.trainer, world_size)
    start = _run_agent if env.is_standalone and config.ddp.launcher != "spawn" else _spawn
    with _environment(n, local=env.is_standalone):
        code, interrupted = _run_with_restarts(
            partial(start, config, replace(env, world_size=world_size), overrides), config.ddp.max_restarts, directory
        )
        if code and env.is_rank_zero and not env.is_standalone:
            time.sleep(STORE_LINGER_S)
    return code, interrupted


def _run_with_restarts(attempt: Callable[[], WorkerExit], max_restarts: int, directory: Path) -> tuple[int, bool]:
    """Call `attempt` until it succeeds or a restart cannot help; return as `train_on_workers` does."""
    before = read_result(directory)
    for restart in range(max_restarts + 1):
        if restart:
            log.warning("restart %d of %d", restart, max_restarts)
        workers = attempt()
        if workers.signal:
            result = read_result(directory)
            saved = result.get("status") == RunStatus.PREEMPTED or (result and result != before)
            return 0 if saved else 128 + workers.signal, True
        if workers.code < 0:  # it could not log that itself
            log.error("error: rank %d was ended by %s", workers.rank, signal.Signals(-workers.code).name)
        if workers.code in (0, USER_ERROR):
            return workers.code, False
    return USER_ERROR if workers.code == EX_TEMPFAIL else FAILURE, False


@contextlib.contextmanager
def _environment(workers: int, local: bool) -> Iterator[None]:
    """Set the environment variables that workers inherit; afterwards restore them and the signal handlers.

    Args:
        local: all ranks are on this machine.
    """
    before = dict(os.environ)
    if local:  # by default gloo and NCCL listen on the address of the host name, which other machines can reach
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces when a store is gone
    package_parent = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, before.get("PYTHONPATH")]))
    handlers = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _silence(prefix: str) -> None:
    """Turn off the loggers of torch that repeat what workers have logged."""
    for name in [prefix, *logging.root.manager.loggerDict]:
        if name.startswith(prefix):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _run_agent(config: Config, env: DistEnv, overrides: list[str]) -> WorkerExit:
    """Run one attempt under torch's elastic agent, whose own restarts would repeat a user error as well.

    The rendezvous is torch's "static": "c10d" unpickles what is in the store. It opens a multi-tenant store at the
    port of the loopback store, and so shares that one's server, which listens on loopback only.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic")
    store = loopback_store()
    endpoint = f"localhost:{store.port}"
    launch = LaunchConfig(1, 1, env.world_size, run_id="none", rdzv_backend="static", rdzv_endpoint=endpoint)
    launch.rdzv_configs["rank"] = 0
    launch.max_restarts = 0
    launch.signals_to_handle = ",".join(number.name for number in FORWARDED_SIGNALS)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = launch.signals_to_handle
    launch.shutdown_timeout = round(config.snapshot.grace_seconds) + 5  # seconds; torch 2.9 ignores it and waits 30
    try:
        elastic_launch(launch, sys.executable)("-m", "mingpt_ddp", *overrides)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return WorkerExit(failure.exitcode, rank)
    except SignalException as error:
        return WorkerExit(signal=error.sigval)
    return WorkerExit()


def _spawn(config: Config, env: DistEnv, overrides: list[str]) -> WorkerExit:
    """Run one attempt by torch.multiprocessing; other parents may start further ranks.

    A single parent has a store for each attempt. Of several, whose attempts end at different times, the first hosts a
    store that lasts as long as its process.
    """
    from torch import multiprocessing

    _silence("torch.multiprocessing")
    first = replace(env, has_agent=True)
    if env.is_standalone:
        store = loopback_store()  # until this function returns
        first = replace(first, master_address=("localhost", store.port))
    elif env.is_rank_zero:
        connect(env, 0, config.ddp.timeout_s)
    received = 0

    def forward_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward_signal)
    n = config.ddp.nproc_per_node or 0
    arguments = (os.getpid(), [worker_environ(first, index, n) for index in range(n)], overrides)
    started = multiprocessing.start_processes(_worker, arguments, nprocs=n, join=False, start_method="spawn")
    if received:  # before all workers were there
        forward_signal(received, None)
    try:
        while not started.join():
            pass
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
        return WorkerExit(getattr(error, "exit_code", FAILURE), env.rank + error.error_index, received)
    return WorkerExit(signal=received if env.is_standalone else 0)  # not every machine can read result.json


def _worker(index: int, parent: int, variables: list[dict[str, str]], overrides: list[str]) -> None:
    if os.getppid() != parent:  # it died during the imports
        exit_process(None, FAILURE)
    os.setsid()  # so that Ctrl-C on the terminal arrives once, forwarded by the parent
    os.environ.update(variables[index])
    sys.argv[1:] = overrides
    runpy.run_module("mingpt_ddp", run_name="__main__")
