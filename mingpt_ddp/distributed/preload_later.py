"""Imported last by the fork server: import what the first workers do without, for a restart.

That is TensorBoard, which takes half a second. A timer, not a thread: the server may fork at any
moment. The server is single-threaded, so a request that comes during the import waits.
"""

import atexit
import contextlib
import signal
from types import FrameType

AFTER_S = 10.0


def _import(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # a worker that needs it reports the error
        import torch.utils.tensorboard  # noqa: F401


signal.signal(signal.SIGALRM, _import)
signal.setitimer(signal.ITIMER_REAL, AFTER_S)  # a forked process does not inherit the timer
# the interpreter gives up its handlers at exit: then the signal would kill the server
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
