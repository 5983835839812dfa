"""A device that works behind the host, as a GPU does, by a clock that moves only when told to."""

from __future__ import annotations

from typing import Any

from mingpt_ddp.distributed.runtime import Runtime


class QueuedDevice:
    """A runtime with such a device."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.time = 0.0  # of the host, in seconds
        self.done_at = 0.0  # when the device will have done what is queued

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def queue(self, seconds: float) -> None:
        """Queue work; the host goes on at once."""
        self.done_at = max(self.time, self.done_at) + seconds

    def wait_until(self, time: float) -> None:
        """Let the host wait for something else than the device."""
        self.time = max(self.time, time)

    def now(self) -> float:
        """Wait for the device; return the time, as Runtime.now does."""
        self.wait_until(self.done_at)
        return self.time
