"""Measure how long each stage of a start takes, such as reading the data, for the log.

An attempt is one start of the processes of a run. A run that is restarted after a failure has
several attempts. All times are in seconds.
"""

import time


class StartTimes:
    """The times, by time.monotonic(), at which the stages of this attempt's start were done."""

    def __init__(self, began_at: float) -> None:
        """
        Args:
            began_at: Time at which the attempt began. After a failure, this is when the launcher
                noticed the end of the previous attempt.
        """
        self.began_at = began_at
        self._ends: list[tuple[str, float]] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self.began_at

    def done(self, stage: str, at: float | None = None) -> None:
        """Record that a stage has ended. The next stage begins at the same time.

        Args:
            at: Time at which the stage ended. None if it ends with this call.
        """
        self._ends.append((stage, time.monotonic() if at is None else at))

    def describe(self) -> str:
        """List the stages in order, each with its seconds."""
        parts = []
        since = self.began_at
        for stage, end in self._ends:
            parts.append(f"{stage} {end - since:.2f} s")
            since = end
        return ", ".join(parts)
