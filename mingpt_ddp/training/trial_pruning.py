"""The median stopping rule for the jobs of a sweep.

Golovin et al., "Google Vizier: A Service for Black-Box Optimization", 2017.
"""

import contextlib
import logging
import statistics
from pathlib import Path

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics.jsonl import METRICS, MetricsHistory, read_history

log = logging.getLogger(__name__)

MIN_JOBS = 5  # for a median


class MedianPruner:
    """End a job whose lowest validation loss is above the median of earlier jobs at the same step.

    Only jobs that started earlier count, so that pruning does not depend on where a sweep was interrupted.
    """

    def __init__(self, config: Config, runtime: Runtime, directory: Path) -> None:
        """
        Args:
            directory: of the job; the other directories of its parent are the other jobs.
        """
        in_sweep = "/" in config.run_name()  # else its parent holds unrelated runs
        self.enabled = config.trainer.prune == "median" and in_sweep
        self.after, self.runtime, self.directory = config.trainer.prune_after, runtime, directory
        self._histories: dict[Path, tuple[tuple[int, int], MetricsHistory]] = {}  # by file, with its size and time

    def should_prune(self, step: int, best_val_loss: float) -> bool:
        """Return whether to end the job after `step`. A collective."""
        if not self.enabled or step < self.after:
            return False
        median = self.runtime.group.run_on_rank_zero(lambda: self._median(step))
        if median is None or best_val_loss <= median:
            return False
        values = (step, best_val_loss, median)
        log.info("pruned at step %d: validation loss %.4f is above the median %.4f of earlier jobs", *values)
        return True

    def _median(self, step: int) -> float | None:
        """Return the median of the earlier jobs' lowest losses up to `step`; None if too few have reached it."""
        own = self._history(self.directory)
        jobs = map(self._history, self.directory.parent.iterdir())
        earlier = [job.series("val_loss") for job in jobs if own and job and job.began < own.began]
        reached = [losses for losses in earlier if losses and losses[0][0] <= step <= losses[-1][0]]
        lowest = [min(loss for at, loss in losses if at <= step) for losses in reached]
        return statistics.median(lowest) if len(lowest) >= MIN_JOBS else None

    def _history(self, directory: Path) -> MetricsHistory | None:
        """Return what a job has logged; the file is read again only if it has changed."""
        path = directory / METRICS
        with contextlib.suppress(OSError, DataError):
            stat = path.stat()
            version = (stat.st_size, stat.st_mtime_ns)
            if path not in self._histories or self._histories[path][0] != version:
                self._histories[path] = (version, read_history(path))
            return self._histories[path][1]
        return None
