"""Which jobs of a sweep are left."""

import logging
from collections.abc import Iterator

from mingpt_ddp.sweeps.sources import Source
from mingpt_ddp.sweeps.sweep import Sweep

log = logging.getLogger(__name__)


def jobs_left(sweep: Sweep, source: Source) -> Iterator[int]:
    """Yield the numbers of the jobs to run; count those that have ended for good.

    Stop after too many failures.
    """
    for number in range(source.total):
        if sweep.has_too_many_failures:
            log.warning(
                "no other job starts: %d failed, sweep.max_failures=%d",
                len(sweep.failed),
                sweep.settings.max_failures,
            )
            return
        if _is_settled(sweep, number):
            _count_settled(sweep, source, number)
        else:
            yield number


def attempts(sweep: Sweep, number: int) -> Iterator[None]:
    """Yield for each time that a job may start, the first and `sweep.retries`."""
    retries = sweep.settings.retries
    yield
    for retry in range(1, retries + 1):
        if sweep.failed_before(number) is not None:  # as often, with earlier starts
            return
        log.warning("job %d: retry %d of %d", number + 1, retry, retries)
        sweep.failed.pop(number, None)  # not yet
        yield


def _is_settled(sweep: Sweep, number: int) -> bool:
    """Return whether an earlier start has ended a job for good, as its study and its result say.

    Several ranks ask rank zero once the job has its process group.
    """
    if sweep.trials is None or sweep.env.world_size > 1:
        return False
    return sweep.trials.is_settled(number, sweep.limits)


def _count_settled(sweep: Sweep, source: Source, number: int) -> None:
    assert sweep.trials is not None
    reason = sweep.failed_before(number)
    if reason is None:
        sweep.done[number] = sweep.trials.directory(number)
        sweep.n_done_before += 1
        log.info("%s: already complete", sweep.done[number])
    else:
        label = source.label(number)
        sweep.failed[number] = label
        log.info("%s has failed before: %s", label, reason)
