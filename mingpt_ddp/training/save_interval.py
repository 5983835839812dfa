"""How often to save: the interval that loses the least time. All times are in seconds.

The model: failures are a Poisson process, one in `mtbf_s` on average, also during restarts. Training runs for an
interval, stalls for `cost_s` while a snapshot is taken, and goes on. A failure undoes what was trained since the start
of the last snapshot that was durable by then. When a snapshot becomes durable and how long a restart takes do not
change the best interval: benchmarks/availability.py has the formula.
"""

from __future__ import annotations

import math
import time

FIRST_S = 30.0  # of training before the first snapshot, which shows what one costs


def best_interval(cost_s: float, mtbf_s: float, least_s: float = 0.0) -> float:
    """Return the seconds of training between two snapshots that lose the least time to stalls and failures.

    Daly's estimate, J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006. For rare failures it is sqrt(2 * cost_s * mtbf_s), which is
    Young's, J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        cost_s: what training loses to one snapshot: the stall, not the write in the background.
        mtbf_s: mean time between failures of the whole run, that of one node divided by the number of nodes.
        least_s: the time in which a snapshot becomes durable; two do not overlap, so the interval is never shorter.

    Returns:
        The interval without the stall; `least_s` where snapshots are free, infinity where nothing fails.

    Raises:
        ValueError: a time is negative or not a number, or `mtbf_s` is 0.
    """
    if not (mtbf_s > 0 and cost_s >= 0 and least_s >= 0):
        raise ValueError(f"mtbf_s={mtbf_s} must be above 0, cost_s={cost_s} and least_s={least_s} must not be negative")
    if cost_s == 0:
        return least_s
    if cost_s >= 2 * mtbf_s:
        return max(mtbf_s, least_s)
    x = math.sqrt(cost_s / (2 * mtbf_s))
    return max(math.sqrt(2 * cost_s * mtbf_s) * (1 + x / 3 + x * x / 9) - cost_s, least_s)


class SaveInterval:
    """When the next snapshot is due by the clock."""

    def __init__(self, every_minutes: float | None, mtbf_hours: float | None) -> None:
        """
        Args:
            mtbf_hours: mean time between failures, for the best interval; None: do not save by it.
        """
        self.every_minutes, self.mtbf_hours = every_minutes, mtbf_hours
        self.interval_s = FIRST_S  # until the cost of a snapshot is known
        self._since = time.monotonic()
        self._cost_s = 0.0

    def add_cost(self, seconds: float) -> None:
        """Add the time that training has waited for a snapshot."""
        self._cost_s += seconds

    def start(self, durable_s: float | None) -> None:
        """Start the next interval, with a snapshot.

        Args:
            durable_s: seconds that the one before took to become durable; None: there is none.
        """
        if self.mtbf_hours is not None and durable_s is not None:
            self.interval_s = best_interval(self._cost_s, 3600 * self.mtbf_hours, durable_s)
        self._since, self._cost_s = time.monotonic(), 0.0

    def is_due(self) -> bool:
        elapsed = time.monotonic() - self._since
        by_minutes = self.every_minutes is not None and elapsed >= 60 * self.every_minutes
        return by_minutes or (self.mtbf_hours is not None and elapsed >= self.interval_s)
