"""Whether the threads of this process wait for cores that others keep busy.

The threads of an operation wait for the last of them at its end, so that one which has no core
delays all: with two threads and one free core a small model trains ten times slower, or worse.
"""

import math
import time

from mingpt_ddp.linux import waited_for_cores

FIRST_WINDOW_S = 0.25
BUSY = 0.1  # cores that each thread lacks, on average over a window: two threads 0.2


class CoreWaits:
    """How long all threads of this process wait for a core, by the scheduler's own account.

    A window ends with the first `check` after its time, and the next one is twice as long: reading
    the account, in a tenth of a millisecond, is rare. Short noise does not fill a window.
    """

    def __init__(self, threads: int, world_size: int) -> None:
        """
        Args:
            threads: that compute, of this process.
            world_size: of the run.
        """
        self._threads = threads
        self._world_size = world_size
        self._window_s = FIRST_WINDOW_S
        self._begin()

    def _begin(self) -> None:
        self._since = time.perf_counter()
        self._waited = waited_for_cores()

    def check(self) -> str | None:
        """Return a line for the log, once, if too few cores were free in the window that ends."""
        elapsed_s = time.perf_counter() - self._since
        if elapsed_s < self._window_s:
            return None
        before = self._waited
        self._window_s *= 2
        self._begin()
        waited_s = sum(s - before.get(thread, 0.0) for thread, s in self._waited.items())
        line = describe_waits(self._threads, self._world_size, waited_s, elapsed_s)
        if line is not None:
            self._window_s = math.inf
        return line


def describe_waits(threads: int, world_size: int, waited_s: float, elapsed_s: float) -> str | None:
    """Return what to do if threads have waited that long in a time; None if they have hardly."""
    missing = waited_s / elapsed_s
    if missing < BUSY * max(2, threads):  # of a single thread the noise is as that of two
        return None
    advice = "end what else runs on this machine"
    if threads > 1:
        advice += f", or set OMP_NUM_THREADS={max(1, threads - math.ceil(missing))}"
    elif world_size > 1:
        advice += ", or train on fewer ranks here"
    return (
        f"fewer cores are free than this rank has threads ({threads}): in {elapsed_s:.2f} s they "
        f"have waited {waited_s:.2f} s for one, which can make training several times slower; "
        f"{advice}"
    )
