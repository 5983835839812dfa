"""A device that works asynchronously, like a GPU, by a clock that only the test moves."""

from __future__ import annotations

from typing import Any

from mingpt_ddp.distributed.runtime import Runtime


class QueuedDevice:
    """A runtime whose device works asynchronously."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.time = 0.0  # the host's clock, in seconds
        self.done_at = 0.0  # time at which the device will have finished all queued work

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def queue(self, seconds: float) -> None:
        """Queue work for the device. The host does not wait for it."""
        self.done_at = max(self.time, self.done_at) + seconds

    def wait_until(self, time: float) -> None:
        """Let the host wait for something other than the device."""
        self.time = max(self.time, time)

    def now(self) -> float:
        """Wait for the device and return the time, like Runtime.now."""
        self.wait_until(self.done_at)
        return self.time
