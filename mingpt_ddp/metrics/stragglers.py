"""Name the rank that the others wait for: by how much, since when, and why."""

import logging
import statistics

import torch

from mingpt_ddp.distributed.group.process_group import ProcessGroup

log = logging.getLogger(__name__)

SLOW = 1.3  # times the median of the other ranks
MIN_STEPS = 10  # in which the same rank was slow, before it is named
MIN_INTERVALS = 2  # of the log, likewise


class Stragglers:
    """Compare the work of all ranks at every log step. All ranks reach the same verdict."""

    def __init__(self, group: ProcessGroup, step: int) -> None:
        """
        Args:
            step: the last one done.
        """
        self.group = group
        self._last_step = step
        self._was_named = False
        self._slow_steps: dict[int, int] = {}  # by rank
        # (ratio to the median - 1) summed over these steps, by rank
        self._excess: dict[int, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._rank = -1
        self._since = 0
        self._intervals = 0
        self._is_named = False

    def check(
        self, step: int, work_ms: float, data_ms: float, micro_batches: int
    ) -> dict[str, float]:
        """Return the slowest rank and its ratio to the others as metrics, {} for a single rank.

        A collective.

        Args:
            work_ms: of this rank per step, without waiting for others.
            data_ms: the part of it for fetching the batch.
            micro_batches: of this rank per step. Ranks may have one more than others, which does
                not make them slow.
        """
        if self.group.world_size == 1:
            return {}
        row = torch.tensor([work_ms, data_ms], dtype=torch.float64) / micro_batches
        work, data = self.group.all_gather_async(row)().T.tolist()
        slowest = work.index(max(work))
        slowest_ms = work.pop(slowest)
        slowest_data_ms = data.pop(slowest)
        first = self._last_step + 1
        self._last_step = step
        if min(work) <= 0.0 or step < first:  # not measured, or after a rollback
            return {}
        median = statistics.median(work)  # of the other ranks
        ratio = slowest_ms / median
        data_excess = slowest_data_ms - statistics.median(data)
        cause = "data wait" if data_excess > (slowest_ms - median) / 2 else "compute"
        self._judge(range(first, step + 1), slowest, ratio, cause)
        return {"speed/slowest_rank": float(slowest), "speed/slowest_ratio": ratio}

    def _judge(self, steps: range, rank: int, ratio: float, cause: str) -> None:
        """Log a change of the verdict."""
        if ratio < SLOW or rank != self._rank:
            if self._is_named:
                log.info("rank %d is no longer slow since step %d", self._rank, steps[0])
            self._clear()
        if ratio < SLOW:
            return
        if rank != self._rank:
            self._rank = rank
            self._since = steps[0]
        self._intervals += 1
        self._slow_steps[rank] = self._slow_steps.get(rank, 0) + len(steps)
        self._excess[rank] = self._excess.get(rank, 0.0) + (ratio - 1) * len(steps)
        is_clear = self._intervals >= MIN_INTERVALS and steps.stop - self._since >= MIN_STEPS
        if is_clear and not self._is_named:
            self._is_named = True
            self._was_named = True
            message = "rank %d is slow: %.1fx the median step since step %d (%s)"
            log.warning(message, rank, ratio, self._since, cause)

    def log_end(self) -> None:
        """Log which rank was slow most often, if it was for long enough to be named."""
        if not self._was_named:
            return
        rank = max(self._slow_steps, key=self._slow_steps.__getitem__)
        steps = self._slow_steps[rank]
        ratio = 1 + self._excess[rank] / steps
        until = ""
        if self._is_named and rank == self._rank:
            until = f", and still is since step {self._since}"
        message = "rank %d was slow in %d steps, %.1fx the median step on average%s"
        log.info(message, rank, steps, ratio, until)
