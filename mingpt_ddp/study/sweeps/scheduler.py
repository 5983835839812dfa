"""Run concurrent jobs of a sweep on this machine, each in a slot of its own."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from mingpt_ddp.config.job import Job, Outcome, RunStatus
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.distributed.launch.workers import SignalForwarder
from mingpt_ddp.errors import UserError
from mingpt_ddp.process.root_cause import ProcessExit, failed
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.sweeps.progress_line import ProgressLine
from mingpt_ddp.study.sweeps.sources import Source
from mingpt_ddp.study.sweeps.sweep import Sweep
from mingpt_ddp.training.run_job import name_job, outcome_of, run_on_workers

log = logging.getLogger(__name__)


class Scheduler:
    """Gives each free slot the next job.

    Ends when no job is left, after a signal, or when too many jobs have failed. Everything runs in
    one event loop. Therefore code between two awaits is never interrupted.
    """

    def __init__(self, sweep: Sweep, source: Source, compose: Callable[[int], Job]) -> None:
        """
        Args:
            compose: Composes and checks a job by its number.
        """
        self._sweep = sweep
        self._source = source
        self._compose = compose
        self._left = sweep.jobs_left(source)
        self._forwarder = SignalForwarder()
        self._running: dict[Slot, Job] = {}
        self._line = ProgressLine(sweep, self._running)

    def run(self) -> None:
        """Run all jobs. Set `sweep.stopped` if a signal ends the sweep before its last job."""
        with self._forwarder.installed():
            asyncio.run(self._run())
        if self._forwarder.received and not self._sweep.is_over and self._sweep.stopped is None:
            code = 128 + self._forwarder.received[-1]
            self._sweep.stopped = Outcome(RunStatus.PREEMPTED, exit_code=code, signalled=True)

    @property
    def _is_interrupted(self) -> bool:
        """True after a signal to this process or to a job. After that, no other job starts."""
        return bool(self._forwarder.received or self._sweep.stopped)

    async def _run(self) -> None:
        self._changed = asyncio.Condition()
        try:
            await asyncio.gather(*map(self._work, self._sweep.slots))
        finally:
            self._line.close()

    async def _work(self, slot: Slot) -> None:
        """Run one job after another in a slot."""
        while not self._is_interrupted:
            number = next(self._left, None)
            if number is None:
                return
            await self._run_job(number, slot)
            async with self._changed:
                self._changed.notify_all()

    async def _run_job(self, number: int, slot: Slot) -> None:
        """Run a job. If it fails and retries are left, run it again."""
        place = self._source.place(number)
        for _ in self._sweep.attempts(number):
            started_at = time.monotonic()
            outcome = await self._attempt(number, slot)
            seconds = time.monotonic() - started_at
            if outcome is None:  # a signal arrived before the job started
                return
            if outcome.status is RunStatus.PREEMPTED:
                earlier = self._sweep.stopped
                if earlier is None or earlier.exit_code < outcome.exit_code:
                    self._sweep.stopped = outcome
                log.info("job %d: interrupted after %.0f s", number + 1, seconds)
                return
            outcome = self._sweep.record(place, replace(outcome, signalled=False))
            self._line.update()
            if not outcome.has_failed and not outcome.recorded_earlier:
                title = objective_named(self._sweep.settings.metric).title
                prefix = "pruned, " if outcome.status is RunStatus.PRUNED else ""
                result = f"{prefix}{title} {outcome.value:.4f}"
                log.info("job %d: %s after %.0f s", number + 1, result, seconds)
            if self._is_interrupted or not outcome.has_failed:
                return

    async def _attempt(self, number: int, slot: Slot) -> Outcome | None:
        """Run a job once. Return None if a signal arrives before the job starts."""
        ready = self._prepare(number)
        while isinstance(ready, Job) and self._has_running(ready):
            log.info("job %d waits for another job with the same values", number + 1)
            async with self._changed:
                await self._changed.wait()
            if self._is_interrupted:
                return None
            ready = self._prepare(number)
        if isinstance(ready, Outcome):
            return ready
        self._running[slot] = ready
        self._line.update()
        try:
            return await run_on_workers(
                ready, self._sweep.env, self._sweep, time.monotonic(), self._forwarder, slot
            )
        except UserError as error:  # for instance, the result lacks the objective
            return failed(error)
        finally:
            del self._running[slot]
            self._line.update()

    def _has_running(self, job: Job) -> bool:
        return any(other.directory == job.directory for other in self._running.values())

    def _prepare(self, number: int) -> Job | Outcome:
        """Return a job that is ready to start, or its outcome if it has ended or is invalid."""
        try:
            job = self._compose(number)
        except UserError as error:
            return failed(error)
        try:
            return name_job(job, self._sweep.env, self._sweep)
        except Exception as error:
            return outcome_of(error, ProcessExit(number), job)
