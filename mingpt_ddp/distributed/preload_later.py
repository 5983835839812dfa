"""Imported last by the fork server: import what only a restart must not wait for.

The first workers have been forked by then and do not wait for TensorBoard; those of a restart find
it imported. A timer, not a thread: the server may fork at any moment. Its signal comes while the
server waits for a request; a request that comes meanwhile waits.
"""

import contextlib
import signal
from types import FrameType

AFTER_S = 10.0


def _import(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401


signal.signal(signal.SIGALRM, _import)
signal.setitimer(signal.ITIMER_REAL, AFTER_S)  # a forked process does not inherit the timer
