"""Report why a process fails, as one last line for all ranks, and exit."""

import contextlib
import logging
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mingpt_ddp.config.job import Outcome, Reporter, RunStatus
from mingpt_ddp.errors import (
    LONGEST_LINE,
    TRANSIENT_ERRORS,
    ChangedTextError,
    ConfigError,
    JoinError,
    StorageUnavailableError,
    UserError,
)
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv, has_parent_launcher, read_env, take_caller
from mingpt_ddp.process.exit import (
    EX_TEMPFAIL,
    FAILURE,
    USER_ERROR,
    exit_process,
    signal_exit_code,
)
from mingpt_ddp.process.interrupts import INTERRUPTED
from mingpt_ddp.process.parent_watch import die_with_parent, kill_stopped_siblings
from mingpt_ddp.process.terminal import echo_error, escape_what_streams_cannot_encode

if TYPE_CHECKING:
    from mingpt_ddp.process.failures import Failures, RankFailure

log = logging.getLogger(__name__)

# If the connection to another rank (a peer) breaks, a rank waits this long for the peer's error.
ROOT_CAUSE_TIMEOUT_S = 1.0
# Other ranks give local rank 0 this long to report an error that all ranks have.
OTHER_RANKS_WAIT_S = 5.0
# An agent takes this long to notice that a worker has exited. Then it kills the other workers.
AGENT_POLL_S = 1.0


class Peers(Protocol):
    """The part of a process group that is needed to end a process."""

    failures: "Failures"
    heartbeat: dict[str, Any]  # its key "activity" describes what this rank does

    def leave(self) -> None:
        """Leave the group, because all ranks have failed in the same way."""


class ProcessExit:
    """Turn errors of this rank into outcomes, and find the root cause that another rank reports.

    After a failure, the launcher starts all ranks again. Each start is an attempt.
    """

    def __init__(self, job: int = 0) -> None:
        """
        Args:
            job: Index of the job in a sweep.
        """
        self.env = DistEnv()
        self.job = job
        with contextlib.suppress(ConfigError):  # `train` will raise it again
            self.env = read_env()
        self.group: Peers | None = None  # set when this rank has joined its group
        # False if other ranks may have other errors, or none.
        self.ranks_fail_alike = True

    def outcome_of(self, error: Exception, in_sweep: bool = False) -> Outcome:
        """Report an error of this rank to the others, and return how the job has ended.

        If this rank has lost a peer, wait for the report of the peer's error and log it.

        Args:
            in_sweep: True if this process may train another job after this one. It does so if all
                ranks have failed in the same way.
        """
        if isinstance(error, UserError):
            may_go_on = in_sweep and not isinstance(error, ChangedTextError)
            if may_go_on and self._failed_on_all_ranks(error):
                return failed(error)
            return self._user_error_outcome(error)
        if in_sweep and self.env.world_size == 1:
            self._log_traceback("the job failed", error)
            return failed(UserError(self._describe(error)), FAILURE)
        return replace(self._rank_error_outcome(error), ends_process=True, job=self.job)

    def _user_error_outcome(self, error: UserError) -> Outcome:
        if self.group is not None:
            self.group.failures.record(str(error), type(error).__name__)
        return replace(failed(error), ends_process=True, job=self.job)

    def _rank_error_outcome(self, error: Exception) -> Outcome:
        """Return the outcome of an error that is not a UserError, or of the loss of a peer."""
        import torch.distributed as dist

        is_gloo_error = isinstance(error, RuntimeError) and "gloo" in str(error)
        if isinstance(error, dist.DistError) or is_gloo_error:
            return self._lost_peer(error)
        text = self._describe(error)
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(Exception):  # write the error file for torchrun's summary
            get_error_handler().record_exception(error)
        rank = self.env.rank
        self._log_traceback(f"rank {rank} failed", error)
        if self._record_for_later(error, text):
            advice = "a restart would not help: fix it, then run the same command to resume"
            twice = UserError(
                f"rank {rank}: {text}; this error occurred twice at the same step, so {advice}"
            )
            # Exit without waiting for local rank 0: if a peer exits first, the agent restarts all.
            return replace(self._user_error_outcome(twice), reporter=Reporter.THIS_RANK)
        if self.group is not None:
            self.group.failures.record(text)
        return failed(UserError(f"rank {rank}: {text}"), FAILURE)

    def log_peer_failure(self, failure: "RankFailure") -> None:
        """Log the failure of another rank. A user error is logged once per agent."""
        if not failure.error_class:
            log.error("error: rank %d: %s", failure.rank, failure.message)
        elif failure.error_class == StorageUnavailableError.__name__:
            self.env.call_on_rank_zero(lambda: log.error(failure.message))
        elif _is_first_report(self.env, self.job, failure.message):
            log.error(failure.message)

    def _record_for_later(self, error: Exception, text: str) -> bool:
        """Record an error that occurred in a step.

        Return True if an earlier attempt recorded the same error at the same step.
        """
        from mingpt_ddp.process.error_text import is_transient

        if self.group is None or is_transient(error):
            return False
        has_step = re.search(r"step \d", self.group.heartbeat["activity"])
        return bool(has_step) and self.group.failures.record_for_later(text)

    def _describe(self, error: Exception) -> str:
        """Return the error, its file and line, and the activity of this rank, as one line."""
        from mingpt_ddp.process.error_text import describe_error

        return describe_error(error, self.group.heartbeat["activity"] if self.group else "")

    def _log_traceback(self, message: str, error: Exception) -> None:
        """Log a message with a traceback to the file, or to the console if there is no file yet."""
        log.error(message, exc_info=error, extra={"file_only": logs.has_file()})

    def _lost_peer(self, error: Exception) -> Outcome:
        """Log the root cause, which another rank may report."""
        rank = self.env.rank
        log.info("rank %d lost a peer", rank, exc_info=error, extra={"file_only": True})
        cause = self.peer_failure(ROOT_CAUSE_TIMEOUT_S)
        if cause is not None:
            self.log_peer_failure(cause)
        else:
            what = "lost another rank, which has not reported an error (look at the end of its log)"
            log.error("error: rank %d %s: %s", rank, what, self._describe(error))
        logs.close()  # errors of other threads must not follow the root cause
        return Outcome(RunStatus.FAILED, exit_code=FAILURE, reporter=Reporter.NOBODY)

    def on_signal(self, number: int, ask_for_cause: bool = True) -> NoReturn:
        """Exit. If the signal comes from an agent after another rank failed, log the root cause.

        Args:
            number: Number of the signal.
            ask_for_cause: Look up the root cause in the store. This can take seconds if the store
                is down.
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

    def _failed_on_all_ranks(self, error: UserError) -> bool:
        """Return True if every rank has this error. Then all can start the next job of a sweep."""
        if self.ranks_fail_alike:
            return True
        if self.group is None or not self.group.failures.compare_with_all(str(error)):
            return False
        self.group.leave()  # the next job has another group
        return True

    def peer_failure(self, wait_s: float = 0.0) -> "RankFailure | None":
        """Return the failure that another rank has reported or reports within `wait_s` seconds."""
        if self.group is None:
            return None
        return self.group.failures.first(wait_s)


def failed(error: UserError, exit_code: int = USER_ERROR) -> Outcome:
    """Return the outcome of a failed job. The default exit code says that a user can fix it."""
    return Outcome(RunStatus.FAILED, error=error, exit_code=exit_code)


def exit_with(outcome: Outcome, prints: bool = True) -> NoReturn:
    """Print the error of the last job and exit. Only one rank of each agent prints it.

    Args:
        prints: False if another process shows the error. The log file gets it anyway.
    """
    env = DistEnv()
    with contextlib.suppress(ConfigError):  # this error is in the outcome, or was reported before
        env = read_env()
    if not outcome.has_failed:
        is_preempted = outcome.status is RunStatus.PREEMPTED
        exit_process(None, signal_exit_code(env, outcome.exit_code) if is_preempted else 0)
    error = outcome.error
    if error is None or outcome.reporter is Reporter.NOBODY:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if env.has_agent:
            # Torchrun blames the rank that exits first, so let the rank that failed be the first.
            time.sleep(AGENT_POLL_S)
        exit_process(None, outcome.exit_code)
    if not logging.getLogger(logs.ROOT).handlers:
        logs.to_console(env)
    if outcome.exit_code == FAILURE:
        exit_process(error, FAILURE, prints)
    if outcome.reporter is Reporter.ONE_RANK and env.has_agent and env.local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHER_RANKS_WAIT_S)  # the agent ends this process when local rank 0 has exited
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends by itself
    if isinstance(error, JoinError):
        kill_stopped_siblings(env)
    if isinstance(error, TRANSIENT_ERRORS):
        is_on_all_ranks = isinstance(error, StorageUnavailableError)
        shown = env.call_on_rank_zero(lambda: error) if is_on_all_ranks else error
        exit_process(shown, EX_TEMPFAIL if env.has_agent else USER_ERROR, prints)
    first = error if _is_first_report(env, outcome.job, str(error)) else None
    exit_process(first, USER_ERROR, prints)


def tell_caller(outcome: Outcome) -> None:
    """Write the outcome of this process to the file that its caller has named, if it has named one.

    If several ranks fail, the first one writes the file, and the others leave it as it is.
    """
    caller = take_caller()
    if (
        caller is None
        or caller.outcome_file is None
        or (outcome.has_failed and outcome.error is None)
    ):
        return
    with contextlib.suppress(OSError), open(caller.outcome_file, "x") as file:
        file.write(outcome.to_json())


def _is_first_report(env: DistEnv, job: int, message: str) -> bool:
    """Record a user error for later attempts. Return True if this rank should print the error.

    Only the rank that is the first of its agent to record an error prints it. If the store is lost,
    return True on every rank, so that each one prints the error.
    """
    if not env.has_agent:
        return True
    from mingpt_ddp.process.job_store import ask_store, record_fatal

    return ask_store(lambda: record_fatal(env, job, message), otherwise=True)


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Report errors of a command-line tool as one line and an exit code.

    If torchrun started several ranks, one of them reports the error.
    """
    escape_what_streams_cannot_encode()
    try:
        yield
    except (UserError, OSError) as error:
        if isinstance(error, UserError) and has_parent_launcher():
            exit_with(failed(error))
        text = str(error)
        if not isinstance(error, UserError):
            text = f"error: {' '.join(text.split())}"
        echo_error(text[:LONGEST_LINE])
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        echo_error("interrupted")
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def process_exit() -> Iterator[None]:
    """Run the body of a script that trains, then exit with the exit code that main.py would have.

    An error is printed as one line. If torchrun has started this rank, it exits when torchrun dies.
    The process ends with os._exit, because normal interpreter shutdown sometimes aborts in a
    background thread of torch, which torchrun counts as a failure.
    """
    if has_parent_launcher():
        die_with_parent()
    exits = ProcessExit()
    logs.to_console(exits.env)
    try:
        yield
    except KeyboardInterrupt:
        log.error("interrupted")
        exit_process(None, INTERRUPTED)
    except Exception as error:
        outcome = exits.outcome_of(error)
        tell_caller(outcome)
        exit_with(outcome)
    exit_process(None, 0)
