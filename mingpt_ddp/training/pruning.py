"""Jobs of a sweep that do worse than most end early.

The median stopping pruner of Golovin et al., "Google Vizier: A Service for Black-Box Optimization", 2017.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from pathlib import Path

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics.jsonl import METRICS, MetricsHistory, read_history

log = logging.getLogger(__name__)

FEWEST = 5  # jobs to compare with


class MedianPruner:
    """Compares a job with those that began before it, whose directories stand beside its own.

    They are the same when a sweep is continued: which jobs are pruned does not depend on where it was killed.
    """

    def __init__(self, config: Config, runtime: Runtime, directory: Path) -> None:
        """
        Args:
            directory: the job's.
        """
        in_group = "/" in config.run_name()  # else there are unrelated runs beside it
        self.applies = config.trainer.prune == "median" and in_group
        self.after, self.runtime, self.directory = config.trainer.prune_after, runtime, directory
        self._read: dict[Path, tuple[tuple[int, int], MetricsHistory]] = {}

    def should_prune(self, step: int, lowest: float) -> bool:
        """Whether the job is to end behind `step`. A collective.

        Args:
            lowest: of its validation losses so far.
        """
        if not self.applies or step < self.after:
            return False
        median = self.runtime.group.run_on_rank_zero(lambda: self._median(step))
        if median is None or lowest <= median:
            return False
        log.info(
            "pruned at step %d: the lowest validation loss %.4f is above %.4f, the median of the jobs before it",
            *(step, lowest, median),
        )
        return True

    def _median(self, step: int) -> float | None:
        """Of the other jobs' lowest losses up to `step`; None where too few of them have got so far."""
        own = self._records(self.directory)
        lowest = []
        for directory in self.directory.parent.iterdir() if own else ():
            records = self._records(directory)
            if own and records and records.began < own.began:
                losses = records.series("val_loss")
                if losses and losses[-1][0] >= step:
                    lowest.append(min(loss for measured, loss in losses if measured <= step))
        return statistics.median(lowest) if len(lowest) >= FEWEST else None

    def _records(self, directory: Path) -> MetricsHistory | None:
        """A job's history, read anew if it has grown."""
        path = directory / METRICS
        with contextlib.suppress(OSError, DataError):
            now = path.stat()
            state = (now.st_size, now.st_mtime_ns)
            if path not in self._read or self._read[path][0] != state:
                self._read[path] = (state, read_history(path))
            return self._read[path][1]
        return None
