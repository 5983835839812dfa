"""What asks a run to stop: a scheduler's SIGTERM or SIGUSR1, the user's Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalHandler:
    """While `heeded` someone looks at `asked` at every step; else a signal ends the process at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None  # the name of the first signal
        self.at = 0.0  # time.monotonic() when it came
        self.deferred = False
        self.exit: Callable[[int], None] = lambda number: os._exit(128 + number)
        self.on_hang: Callable[[str], None] = lambda reason: os._exit(1)  # a rank has: see `watch`
        self.peer_failed: Callable[[], bool] = lambda: False  # nobody could answer: another rank has failed

    def install(self) -> None:
        """From now on this process handles the signals; only its main thread may call this."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        leaving = (
            self.signal_name is not None
        )  # a scheduler tells all processes, and then the launcher tells its workers
        again = leaving and number == signal.SIGINT
        if again or not (self.deferred or leaving) or self.peer_failed():
            self.exit(number)
        if self.signal_name is None:
            self.signal_name, self.at = name, time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the signal came; 0 where none did."""
        return time.monotonic() - self.at if self.signal_name is not None else 0.0
