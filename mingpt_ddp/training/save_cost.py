"""Measure what a snapshot costs training: stalls, and slower steps while it is written.

The background threads of a save hash and write. Where every core trains, that takes time of the
steps. All times are in seconds.
"""

FIRST_STEPS = 10  # of an attempt, which are slower
NEWEST_STEP = 0.05  # weight of the newest step in the moving mean
NEWEST_SAVE = 0.25  # weight of the newest snapshot in the moving mean
MOST = 4.0  # times the mean that a step counts: a longer one has another cause


class SaveCost:
    """The cost of the last snapshot so far."""

    def __init__(self) -> None:
        self._stall_s = 0.0  # since the last snapshot was taken
        self._slower_s = 0.0  # the steps during its save, all together
        self._steps = 0  # with no save in progress
        self._step_s = 0.0  # moving mean of these

    @property
    def seconds(self) -> float:
        """The time that the last snapshot has cost so far."""
        return self._stall_s + max(0.0, self._slower_s)

    def begin_snapshot(self) -> None:
        """Count for another snapshot from now on."""
        self._stall_s = 0.0
        self._slower_s = 0.0

    def add_stall(self, seconds: float) -> None:
        """Count time in which training waited."""
        self._stall_s += seconds

    def add_step(self, seconds: float, is_saving: bool) -> float:
        """Count a step; return the change of the time lost to slower steps.

        It is negative if this one was faster.

        Args:
            seconds: of the step, without stalls.
            is_saving: whether a save was in progress when it began.
        """
        if not is_saving:
            self._steps += 1
            self._add_to_mean(seconds)
            return 0.0
        if self._steps <= FIRST_STEPS:  # nothing to compare with
            return 0.0
        before_s = max(0.0, self._slower_s)
        self._slower_s += self._limited(seconds) - self._step_s
        return max(0.0, self._slower_s) - before_s

    def _add_to_mean(self, seconds: float) -> None:
        timed = self._steps - FIRST_STEPS
        if timed == 1:
            self._step_s = seconds
        elif timed > 1:
            weight = max(1 / timed, NEWEST_STEP)
            self._step_s += weight * (self._limited(seconds) - self._step_s)

    def _limited(self, seconds: float) -> float:
        return min(seconds, MOST * self._step_s)


def moving_mean(before_s: float | None, newest_s: float) -> float:
    """Return the mean cost of the snapshots up to the newest; `before_s` is None at the first."""
    if before_s is None:
        return newest_s
    return before_s + NEWEST_SAVE * (newest_s - before_s)
