"""How long the stages of a start take, for the log. All times are in seconds."""

import time


class StartTimes:
    """When the stages of this attempt's start were done, by time.monotonic()."""

    def __init__(self, began_at: float) -> None:
        """
        Args:
            began_at: when the attempt began: its launcher noticed the end of the last one.
        """
        self.began_at = began_at
        self._ends: list[tuple[str, float]] = []

    @property
    def elapsed(self) -> float:
        """The seconds since the attempt began."""
        return time.monotonic() - self.began_at

    def done(self, stage: str, at: float | None = None) -> None:
        """Record the end of a stage, now or at another time; the next one begins there."""
        self._ends.append((stage, time.monotonic() if at is None else at))

    def describe(self) -> str:
        """Return the stages in order, each with its seconds."""
        parts = []
        since = self.began_at
        for stage, end in self._ends:
            parts.append(f"{stage} {end - since:.2f} s")
            since = end
        return ", ".join(parts)
