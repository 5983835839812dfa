"""Set up a process that loads samples for a rank."""

import ctypes
import signal
import sys


def set_up(_: int) -> None:
    """Let a loader process die with its rank, and ignore signals.

    It has inherited the rank's lock and connections.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
