"""Measure what a snapshot costs training: stalls, and slower steps while it is written.

The background threads of a save hash and write. Where every core trains, that is time of the steps.
All times are in seconds.
"""

NEWEST_STEP = 0.05  # weight of the newest step in the mean
NEWEST_SAVE = 0.25  # weight of the newest snapshot in the mean


class SaveCost:
    """The cost of the last snapshot so far."""

    def __init__(self) -> None:
        self.seconds = 0.0  # since the last snapshot was taken
        self._step_s = 0.0  # mean of the steps without a save in progress
        self._steps = 0  # of them

    def mean(self, earlier: float | None) -> float:
        """Return the mean cost of a snapshot; `earlier` is that before the last one, if any."""
        seconds = max(0.0, self.seconds)  # a step may be faster than the mean
        if earlier is None:
            return seconds
        return earlier + NEWEST_SAVE * (seconds - earlier)

    def add_step(self, seconds: float, is_saving: bool) -> float:
        """Count a step; return by how much it was slower than those without a save in progress.

        Args:
            seconds: of the step, without stalls.
            is_saving: whether a save was in progress when it began.
        """
        if not is_saving:
            self._steps += 1
            weight = max(1 / self._steps, NEWEST_STEP)
            self._step_s += weight * (seconds - self._step_s)
            return 0.0
        if self._steps == 0:
            return 0.0
        slower = seconds - self._step_s
        self.seconds += slower
        return slower
