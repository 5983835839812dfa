"""End the process: exit codes, the last log line, os._exit."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from typing import NoReturn

from mingpt_ddp.errors import UserError
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.sockets import delete_socket_directory

log = logging.getLogger(__name__)

# Exit codes of all commands and workers. Other codes are 0, and 128 + n after signal n. A preempted
# worker exits with ddp.preempted_exit_code, which is 0 by default: after any other code, torchrun's
# agent would restart it.
FAILURE = 1  # a crash; a restart may succeed
USER_ERROR = 2  # the last line says what to fix; a restart would fail too
# The storage is unavailable, or a SLURM job asks to be requeued. The name comes from <sysexits.h>.
EX_TEMPFAIL = 75


def exit_process(error: UserError | None, code: int, to_console: bool = True) -> NoReturn:
    """Log the error, and call os._exit.

    os._exit keeps Hydra from starting another job, and destructors from waiting for other ranks.

    Args:
        error: The error to log, or None.
        code: The exit code of the process.
        to_console: False if the parent process prints the error.
    """
    try:
        if error is not None:
            log.error(str(error), extra={"file_only": not to_console})
        logs.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        if multiprocessing.parent_process() is None:
            delete_socket_directory()  # os._exit skips multiprocessing's own cleanup
    finally:  # any of these calls may raise in a signal handler
        os._exit(code)


def signal_exit_code(env: DistEnv, code: int) -> int:
    """Return the exit code of a process that a signal ends early.

    A SLURM job that submitit started is requeued after EX_TEMPFAIL (conf/sweep/slurm.yaml). A job
    that reached its time limit before training began must not be requeued: it would get no further.
    """
    is_submitted = os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and env.is_standalone
    reached_time_limit = code == 128 + signal.SIGUSR1
    if is_submitted and not reached_time_limit:
        return EX_TEMPFAIL
    return code
