"""React to a signal: end the process, or let the training loop save and stop."""

import signal
import time
from types import FrameType

from mingpt_ddp.process.interrupts import handle
from mingpt_ddp.process.root_cause import ProcessExit


class SignalHandler:
    """Handle signals of this process.

    While `deferred` is True, the first signal only sets `signal_name`, which the training loop
    polls. Otherwise a signal ends the process.
    """

    def __init__(self, exits: ProcessExit | None = None) -> None:
        self.exits = exits or ProcessExit()
        self.signal_name: str | None = None  # name of the first signal, such as SIGTERM
        self.received_at = 0.0  # time.monotonic() of the first signal
        self.deferred = False

    def install(self) -> None:
        """Handle the signals from now on. Only the main thread may call this."""
        handle(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.signal_name is None
        # A second signal only counts if it is Ctrl-C. The signal of a scheduler may arrive twice:
        # from the scheduler and from the launcher.
        repeated_interrupt = not first and number == signal.SIGINT
        if repeated_interrupt:
            self.exits.on_signal(number, ask_for_cause=False)
        # If another rank has failed, the training loop cannot save, because a save is a collective.
        if (first and not self.deferred) or self.exits.peer_failure():
            self.exits.on_signal(number)
        if first:
            self.signal_name = signal.Signals(number).name
            self.received_at = time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the first signal, or 0 if there was none."""
        if self.signal_name is None:
            return 0.0
        return time.monotonic() - self.received_at
