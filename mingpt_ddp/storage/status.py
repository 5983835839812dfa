"""How a run has ended, as its result.json has it."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    COMPLETE = "complete"  # at its limits
    PREEMPTED = "preempted"  # by a signal: the same command goes on
    PRUNED = "pruned"  # as one of a sweep's jobs, because it did worse than others
