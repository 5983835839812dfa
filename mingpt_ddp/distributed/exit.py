"""How a process ends: what it tells last, and with which exit code. The last line of a worker names what went wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import LONGEST_LINE, StorageUnavailableError, UserError, printable

if TYPE_CHECKING:
    from mingpt_ddp.distributed.runtime import Runtime

log = logging.getLogger(__name__)

USER_ERROR, FAILURE = 2, 1  # exit codes
EX_TEMPFAIL = 75  # of a worker to its agent, of a job to its scheduler: EX_TEMPFAIL of <sysexits.h>
ROOT_CAUSE_TIMEOUT_S = 1.0  # how long a rank that lost the others waits for the reason
STORE_S = 5.0  # how long the job's store may take to answer
AGENT_POLL_S = 1.0  # within which an elastic agent notices that one worker is gone and ends the others


def exit_process(message: str | None, code: int) -> NoReturn:
    """End at once: neither Hydra's launcher may go on with the next job, nor a process group wait for its members."""
    if message is not None:
        log.error(message)
    logs.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Around a command-line tool: its error is one line, exit code 2."""
    try:
        yield
    except BrokenPipeError:  # the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        text = str(error) if isinstance(error, UserError) else f"error: {' '.join(str(error).split())}"
        print(printable(text)[:LONGEST_LINE], file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def signal_exit_code(env: DistEnv, code: int) -> int:
    """The exit code of a process that ends early because a signal has asked for it.

    A SLURM job of submitit's has one with which it is queued again (conf/sweep/slurm.yaml), but not when its time was
    over before training began: it would be again.
    """
    submitted = os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and env.is_standalone
    return EX_TEMPFAIL if submitted and code != 128 + signal.SIGUSR1 else code


def exit_user_error(error: UserError, env: DistEnv, job: int) -> NoReturn:
    """All ranks have the same error, or one alone: each parent tells it once, by rank 0 if that has it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not logging.getLogger(logs.ROOT).handlers:
        logs.to_console(env)
    if env.has_agent and not env.is_rank_zero:
        time.sleep(AGENT_POLL_S)
    if isinstance(error, StorageUnavailableError):  # every rank has met it, and the next attempt may not
        exit_process(str(error) if env.is_rank_zero else None, EX_TEMPFAIL if env.has_agent else USER_ERROR)
    exit_process(str(error) if _first_to_report(str(error), env, job) else None, USER_ERROR)


def _first_to_report(message: str, env: DistEnv, job: int) -> bool:
    if not env.has_agent:
        return True
    from mingpt_ddp.distributed.rendezvous import call_with_timeout, claim_error_report, connect

    try:
        parent = f"{socket.gethostname()}/{os.getppid()}"  # each has a console of its own
        return call_with_timeout(
            STORE_S, lambda: claim_error_report(connect(env, job, timeout_s=STORE_S), message, parent)
        )
    except Exception:  # without the agent's store nobody can know: better twice than never
        return True


def exit_failure(error: BaseException, env: DistEnv, runtime: Runtime | None) -> NoReturn:
    """The rank that failed reports why; a rank that only lost its peers waits for that report and repeats it."""
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    if not _is_lost_peer(error):
        if runtime is not None:
            runtime.group.report_failure(summary)
        _record_for_agent(error)
        log.error("rank %d failed", env.rank, exc_info=error)
        exit_process(f"error: rank {env.rank}: {summary}", FAILURE)
    log.info("rank %d lost its peers", env.rank, exc_info=error, extra={"file_only": True})
    reason = runtime.group.reported_failure(ROOT_CAUSE_TIMEOUT_S) if runtime is not None else None
    log.error("error: %s", reason or f"rank {env.rank} lost another rank: {summary[:200]}")
    logs.close()  # what a thread beside this one sees of the same failure is not the last word
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if env.has_agent:
        time.sleep(AGENT_POLL_S)  # the agent blames the first to go
    exit_process(None, FAILURE)


def exit_hang(reason: str) -> None:
    """The others have a moment to tell it as well: the agent ends all when the first has gone."""
    log.error("error: %s", reason)
    time.sleep(AGENT_POLL_S)
    exit_process(None, FAILURE)


def exit_on_signal(number: int, env: DistEnv, runtime: Runtime | None) -> None:
    """An agent ends the ranks that are left when one has failed: they tell why, as far as they know."""
    try:
        reason = (
            runtime.group.reported_failure(ROOT_CAUSE_TIMEOUT_S) if runtime is not None and env.world_size > 1 else None
        )
        if reason:
            log.error("error: %s", reason)
        elif env.is_rank_zero:
            log.error("ended by %s; the same command continues from the last snapshot", signal.Signals(number).name)
    finally:
        os._exit(signal_exit_code(env, 128 + number))


def _is_lost_peer(error: BaseException) -> bool:
    """Whether the error came from the connection to other ranks rather than from this one."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _record_for_agent(error: BaseException) -> None:
    """Leave the error where torchrun's summary finds it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def fail() -> None:
        raise error

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        with contextlib.suppress(BaseException):
            record(fail)()
