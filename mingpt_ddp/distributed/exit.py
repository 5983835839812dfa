"""Print results and errors, and exit: exit codes, the last log line, os._exit."""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, NoReturn

from mingpt_ddp import linux
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv, has_parent_launcher, read_env, report_error
from mingpt_ddp.errors import (
    LONGEST_LINE,
    MAY_PASS,
    ConfigError,
    JoinError,
    OutputError,
    StorageUnavailableError,
    UserError,
    printable,
    reason,
)
from mingpt_ddp.interrupts import INTERRUPTED
from mingpt_ddp.storage.sockets import delete_socket_directory

if TYPE_CHECKING:
    from mingpt_ddp.distributed.group.failures import Failure
    from mingpt_ddp.distributed.group.process_group import ProcessGroup

log = logging.getLogger(__name__)

# The exit codes of every command and worker, besides 0 and, after signal n, 128 + n. A preempted
# worker exits with ddp.preempted_exit_code, by default 0: torchrun's agent restarts it after any
# other code.
FAILURE = 1  # a crash: a restart may succeed
USER_ERROR = 2  # the last line says what to fix: a restart would fail too
CLOSED_PIPE = 128 + signal.SIGPIPE  # nobody reads the rest of the output, as in `... | head -1`
# EX_TEMPFAIL of <sysexits.h>: the storage is unavailable, or a SLURM job asks to be requeued.
EX_TEMPFAIL = 75

ROOT_CAUSE_TIMEOUT_S = 1.0  # how long a rank that lost a peer waits for the root cause
# Other ranks give local rank 0 this long to report an error that all ranks have.
SLOWER_S = 5.0
# An agent takes this long to notice that a worker has exited. Then it kills the other workers.
AGENT_POLL_S = 1.0


def exit_process(error: UserError | None, code: int) -> NoReturn:
    """Log the error, report it to a caller in Python, and call os._exit.

    os._exit keeps Hydra from starting another job, and destructors from waiting for other ranks.
    """
    try:
        if error is not None:
            log.error(str(error))
            report_error(error)
        logs.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        if multiprocessing.parent_process() is None:
            delete_socket_directory()  # os._exit skips multiprocessing's own cleanup
    finally:  # any of these calls may raise in a signal handler
        os._exit(code)


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Report errors of a command-line tool as one line and an exit code.

    If torchrun started several ranks, one of them reports the error.
    """
    logs.escape_what_streams_cannot_encode()
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, UserError) and has_parent_launcher():
            ProcessExit().user_error(error)
        text = str(error)
        if not isinstance(error, UserError):
            text = f"error: {' '.join(text.split())}"
        echo_error(text[:LONGEST_LINE])
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        echo_error("interrupted")
        sys.exit(INTERRUPTED)


def echo(text: str, *, verbatim: bool = False) -> None:
    """Print a result on standard output. A process without standard output prints nothing.

    If the reader of the output has exited, exit like a program that SIGPIPE ends.

    Args:
        verbatim: Keep terminal escapes, which untrusted text may contain.

    Raises:
        OutputError: The result cannot be written.
    """
    try:
        _print(text if verbatim else printable(text), sys.stdout)
    except BrokenPipeError:
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        raise OutputError(
            f"cannot write to standard output: {reason(error)}; free space, or send it elsewhere"
        ) from error


def echo_error(text: str) -> None:
    """Print untrusted text on standard error. Failures to write do not change the exit code."""
    with contextlib.suppress(OSError):
        _print(printable(text), sys.stderr)


def drop_unwritten_log() -> None:
    """Drop log lines that standard error does not take. They must not change the exit code."""
    with contextlib.suppress(OSError):
        _print("", sys.stderr, end="")


def _print(text: str, stream: IO[str] | None, end: str = "\n") -> None:
    if stream is None:  # closed
        return
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        # At exit Python would write the buffer again, fail again, and exit with code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def die_with_parent(expected: int | None = None) -> None:
    """Exit when the parent process dies.

    An orphaned worker must not train concurrently with its successor.

    Args:
        expected: Process id of the parent. None for the current parent.
    """
    parent = expected or os.getppid()

    def wait_for_parent() -> None:
        launcher = multiprocessing.parent_process()
        if launcher is not None:
            launcher.join()  # for a forked worker, whose parent is the fork server
        else:
            while os.getppid() == parent:
                time.sleep(0.2)
        exit_process(None, FAILURE)

    if sys.platform == "linux":
        linux.die_with_parent()
        if os.getppid() != parent:  # the parent has died before the call
            exit_process(None, FAILURE)
    if sys.platform != "linux" or multiprocessing.parent_process() is not None:
        threading.Thread(target=wait_for_parent, name="parent-watch", daemon=True).start()


def kill_stopped_siblings(env: DistEnv) -> None:
    """SIGKILL stopped processes of the same agent. It would wait for them: they ignore SIGTERM.

    The launcher of `ddp.nproc_per_node` does this itself.
    """
    if env.has_agent and multiprocessing.parent_process() is None:
        linux.kill_stopped_children(os.getppid())


def signal_exit_code(env: DistEnv, code: int) -> int:
    """Return the exit code of a process that a signal ends early.

    A SLURM job that submitit started is requeued after EX_TEMPFAIL (conf/sweep/slurm.yaml). But a
    job that reached its time limit before training began is not: it would get no further.
    """
    is_submitted = os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and env.is_standalone
    reached_time_limit = code == 128 + signal.SIGUSR1
    if is_submitted and not reached_time_limit:
        return EX_TEMPFAIL
    return code


class ProcessExit:
    """Exit with a last line that names the root cause, even if another rank has reported it."""

    def __init__(self, job: int = 0) -> None:
        """
        Args:
            job: Number of the job in a sweep.
        """
        self.env = DistEnv()
        self.job = job
        with contextlib.suppress(ConfigError):  # `train` will raise it again
            self.env = read_env()
        self.group: ProcessGroup | None = None  # set when this rank has joined its group
        self.is_symmetric = True  # True if all ranks have the same errors

    def user_error(self, error: UserError, *, may_be_of_all: bool = True) -> NoReturn:
        """Log the error once per agent, even if every rank has it, and exit.

        Args:
            may_be_of_all: All ranks may have this error, so local rank 0 of the agent reports it.
        """
        if self.group is not None:
            self.group.failures.record(str(error), type(error).__name__)
        if may_be_of_all and self.env.has_agent and self.env.local_rank > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(SLOWER_S)  # the agent ends this process when local rank 0 has exited
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent need not end this process
        if not logging.getLogger(logs.ROOT).handlers:
            logs.to_console(self.env)
        if isinstance(error, JoinError):
            kill_stopped_siblings(self.env)
        if isinstance(error, MAY_PASS):
            is_of_all = isinstance(error, StorageUnavailableError)
            shown = self.env.call_on_rank_zero(lambda: error) if is_of_all else error
            exit_process(shown, EX_TEMPFAIL if self.env.has_agent else USER_ERROR)
        exit_process(error if self._is_first_report(str(error)) else None, USER_ERROR)

    def _is_first_report(self, message: str) -> bool:
        """Record a user error for later attempts. Return True if its agent has none so far.

        If the store is lost, every rank prints the error.
        """
        if not self.env.has_agent:
            return True
        from mingpt_ddp.distributed.group.rendezvous import ask_store, record_fatal

        return ask_store(lambda: record_fatal(self.env, self.job, message), otherwise=True)

    def log_peer_failure(self, failure: "Failure") -> None:
        """Log the failure of another rank. A user error is logged once per agent."""
        if not failure.kind:
            log.error("error: rank %d: %s", failure.rank, failure.message)
        elif failure.kind == StorageUnavailableError.__name__:
            self.env.call_on_rank_zero(lambda: log.error(failure.message))
        elif self._is_first_report(failure.message):
            log.error(failure.message)

    def failure(self, error: Exception) -> NoReturn:
        """Report the error of this rank and exit.

        After losing a peer, wait for its report and log that instead.
        """
        import torch.distributed as dist

        is_gloo_error = isinstance(error, RuntimeError) and "gloo" in str(error)
        if isinstance(error, dist.DistError) or is_gloo_error:
            self._lost_peer(error)
        text = self.describe(error)
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(Exception):  # write the error file for torchrun's summary
            get_error_handler().record_exception(error)
        rank = self.env.rank
        self.log_traceback(f"rank {rank} failed", error)
        if self._record_for_later(error, text):
            advice = "a restart would not help: mend it, then run the same command to resume"
            twice = UserError(f"rank {rank}: {text}; it came twice at the same step, so {advice}")
            self.user_error(twice, may_be_of_all=False)  # a peer that exits earlier is restarted
        if self.group is not None:
            self.group.failures.record(text)
        exit_process(UserError(f"rank {rank}: {text}"), FAILURE)

    def _record_for_later(self, error: Exception, text: str) -> bool:
        """Record an error in a step. Return True if an earlier attempt had it at the same step."""
        from mingpt_ddp.distributed.error_text import is_transient

        if self.group is None or is_transient(error):
            return False
        has_step = re.search(r"step \d", self.group.heartbeat["activity"])
        return bool(has_step) and self.group.failures.record_for_later(text)

    def describe(self, error: Exception) -> str:
        """Return the error, its file and line, and the activity of this rank, as one line."""
        from mingpt_ddp.distributed.error_text import describe_error

        return describe_error(error, self.group.heartbeat["activity"] if self.group else "")

    def log_traceback(self, what: str, error: Exception) -> None:
        """Log a traceback to the file, or to the console if there is no file yet."""
        log.error(what, exc_info=error, extra={"file_only": logs.has_file()})

    def _lost_peer(self, error: Exception) -> NoReturn:
        """Log the root cause, which another rank may report, and exit."""
        rank = self.env.rank
        log.info("rank %d lost a peer", rank, exc_info=error, extra={"file_only": True})
        cause = self.peer_failure(ROOT_CAUSE_TIMEOUT_S)
        if cause is not None:
            self.log_peer_failure(cause)
        else:
            what = "lost another rank, which has reported no error"
            log.error("error: rank %d %s: %s", rank, what, self.describe(error))
        logs.close()  # errors of other threads must not follow the root cause
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.env.has_agent:
            time.sleep(AGENT_POLL_S)  # torchrun blames the first exit: let it be the failed rank
        exit_process(None, FAILURE)

    def on_signal(self, number: int, ask_for_cause: bool = True) -> NoReturn:
        """Exit. If the signal comes from an agent after another rank failed, log the root cause.

        Args:
            ask_for_cause: Look up the root cause in the store. This can take seconds if it is down.
        """
        try:
            cause = self.peer_failure(ROOT_CAUSE_TIMEOUT_S) if ask_for_cause else None
            if cause is not None:
                self.log_peer_failure(cause)
            elif self.env.is_rank_zero:
                name = signal.Signals(number).name
                log.error("ended by %s; rerun the same command to resume", name)
        finally:
            exit_process(None, signal_exit_code(self.env, 128 + number))

    def failed_on_all_ranks(self, error: UserError) -> bool:
        """Return True if every rank has this error. Then all can start the next job of a sweep."""
        if self.is_symmetric:
            return True
        if self.group is None or not self.group.failures.compare_with_all(str(error)):
            return False
        self.group.leave()  # the next job has another group
        return True

    def peer_failure(self, wait_s: float = 0.0) -> "Failure | None":
        """Return the failure that another rank has reported or reports within `wait_s` seconds."""
        if self.group is None:
            return None
        return self.group.failures.first(wait_s)


@contextlib.contextmanager
def process_exit() -> Iterator[None]:
    """Exit after the body of a script that trains, with the exit code that main.py would have.

    An error is one line. A rank that torchrun has started exits when torchrun dies. The exit is
    os._exit, because normal interpreter shutdown sometimes aborts in a background thread of torch,
    which torchrun counts as a failure.
    """
    if has_parent_launcher():
        die_with_parent()
    exits = ProcessExit()
    logs.to_console(exits.env)
    try:
        yield
    except UserError as error:
        exits.user_error(error)
    except Exception as error:
        exits.failure(error)
    exit_process(None, 0)
