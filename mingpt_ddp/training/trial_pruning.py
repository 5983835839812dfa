"""The median stopping rule for the jobs of a sweep.

Golovin et al., "Google Vizier: A Service for Black-Box Optimization", 2017.
"""

import contextlib
import logging
import math
import statistics
from collections.abc import Hashable
from pathlib import Path

from mingpt_ddp.config.config import Config, flatten
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import DataError
from mingpt_ddp.metrics.jsonl import METRICS, MetricsHistory, read_history
from mingpt_ddp.metrics.objective import LOSS, loss_unit, objective_of
from mingpt_ddp.storage.run_dir import recorded_config, run_name

log = logging.getLogger(__name__)

MIN_JOBS = 5  # for a median


class MedianPruner:
    """End a job whose lowest validation loss is above the median of earlier jobs at the same step.

    Where the units of their losses differ, bits per byte take their place. Only jobs that started
    earlier count, so that pruning does not depend on where a sweep was interrupted.
    """

    def __init__(self, config: Config, runtime: Runtime, directory: Path) -> None:
        """
        Args:
            directory: of the job; the other directories of its parent are the other jobs.
        """
        in_sweep = "/" in run_name(config)  # else its parent holds unrelated runs
        self.enabled = config.trainer.prune == "median" and in_sweep
        self.after = config.trainer.prune_after
        self.runtime = runtime
        self.directory = directory
        # by file, with its size and time
        self._histories: dict[Path, tuple[tuple[int, int], MetricsHistory]] = {}
        self._units: dict[Path, Hashable] = {}  # by directory, once recorded

    def should_prune(self, step: int, best_val_loss: float) -> bool:
        """Return whether to end the job after `step`. A collective."""
        if not self.enabled or step < self.after:
            return False
        reason = self.runtime.group.run_on_rank_zero(lambda: self._reason(step, best_val_loss))
        if reason is None:
            return False
        log.info("pruned at step %d: %s", step, reason)
        return True

    def _reason(self, step: int, best_val_loss: float) -> str | None:
        """Return that the lowest value of the job is above the median; None if it goes on."""
        own = self._history(self.directory)
        if own is None:
            return None
        earlier = self._earlier(own.began)
        units = [self._unit(directory) for directory in (self.directory, *earlier)]
        objective = objective_of(units)
        lowest = []  # of the jobs that were evaluated before and at or after this step
        for job in earlier.values():
            series = job.series(objective.series)
            steps = [at for at, _ in series]
            if steps and steps[0] <= step <= steps[-1]:
                lowest.append(_lowest(series, step))
        if len(lowest) < MIN_JOBS:
            return None
        median = statistics.median(lowest)
        best = best_val_loss
        if objective is not LOSS:
            best = _lowest(own.series(objective.series), step)
        if best <= median:
            return None
        return f"{objective.title} {best:.4f} is above the median {median:.4f} of earlier jobs"

    def _earlier(self, began: float) -> dict[Path, MetricsHistory]:
        """Return the jobs that began before, by directory."""
        earlier = {}
        for path in self.directory.parent.iterdir():
            job = self._history(path)
            if job and job.began < began:
                earlier[path] = job
        return earlier

    def _unit(self, directory: Path) -> Hashable:
        """Return the unit of a job's loss; None if its configuration cannot be read."""
        if directory not in self._units:
            config = recorded_config(directory)
            if not config:
                return None
            self._units[directory] = loss_unit(flatten(config), directory)
        return self._units[directory]

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


def _lowest(values: list[tuple[int, float]], step: int) -> float:
    """Return the lowest value up to a step; without any, minus infinity, above no median."""
    return min((value for at, value in values if at <= step), default=-math.inf)
