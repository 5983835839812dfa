"""React to a signal: end the process, or ask the training loop to save and stop."""

import signal
import time
from types import FrameType

from mingpt_ddp.process.interrupts import handle
from mingpt_ddp.process.root_cause import ProcessExit


class SignalHandler:
    """While `deferred`, a signal only sets `signal_name`, which the training loop polls.

    Else it ends the process.
    """

    def __init__(self, exits: ProcessExit | None = None) -> None:
        self.exits = exits or ProcessExit()
        self.signal_name: str | None = None  # of the first signal
        self.received_at = 0.0  # time.monotonic() of the first signal
        self.deferred = False

    def install(self) -> None:
        """Handle the signals from now on; only the main thread may call this."""
        handle(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.signal_name is None
        # A scheduler's signal may arrive twice, the second time from the launcher: only a second
        # Ctrl-C counts.
        repeated_interrupt = not first and number == signal.SIGINT
        if repeated_interrupt:
            self.exits.on_signal(number, ask_for_cause=False)
        # After a failure of another rank a collective save would hang.
        if (first and not self.deferred) or self.exits.peer_failure():
            self.exits.on_signal(number)
        if first:
            self.signal_name = signal.Signals(number).name
            self.received_at = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the first signal; 0 if there was none."""
        if self.signal_name is None:
            return 0.0
        return time.monotonic() - self.received_at
