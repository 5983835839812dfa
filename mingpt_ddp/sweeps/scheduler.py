"""Run concurrent jobs of a sweep on this machine, each in a slot of its own."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from mingpt_ddp.config.compose.hydra_errors import explain
from mingpt_ddp.distributed.device.machine import check_machine
from mingpt_ddp.distributed.exit import USER_ERROR
from mingpt_ddp.distributed.launch.launcher import Ended, run_workers
from mingpt_ddp.distributed.launch.slots import Slot
from mingpt_ddp.distributed.launch.workers import SignalForwarder
from mingpt_ddp.errors import ConfigError, JobError, RunError, UserError
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.storage.run_directory import RunStatus, read_result
from mingpt_ddp.sweeps.local_workers import LocalJob, conclude_local, prepare_local
from mingpt_ddp.sweeps.progress_line import ProgressLine
from mingpt_ddp.sweeps.sources import Source
from mingpt_ddp.sweeps.sweep import Sweep
from mingpt_ddp.training.start.checked_config import checked_config

log = logging.getLogger(__name__)

Compose = Callable[[int, list[str]], DictConfig]


class Scheduler:
    """Give each free slot the next job, until no job is left or a signal or failures end the sweep.

    All of it runs in one event loop, so code between two awaits is never interrupted.
    """

    def __init__(self, sweep: Sweep, source: Source, compose: Compose) -> None:
        """
        Args:
            compose: Composes the configuration of a job, and makes it Hydra's state.
        """
        self._sweep = sweep
        self._source = source
        self._compose = compose
        self._left = sweep.jobs_left(source)
        self._forwarder = SignalForwarder()
        self._running: dict[Slot, LocalJob] = {}
        self._line = ProgressLine(sweep, self._running.values())
        self._codes: list[int] = []  # exit codes of jobs that a signal ended

    def run(self) -> None:
        """Run all jobs. Exit if a signal ends the sweep before its last job has ended."""
        with self._forwarder.installed():
            asyncio.run(self._run())
        if self._is_interrupted and not self._sweep.is_over:
            codes = self._codes or [128 + self._forwarder.received[-1]]
            self._sweep.interrupted(max(codes))

    @property
    def _is_interrupted(self) -> bool:
        """True after a signal to this process or to a job. Then no other job starts."""
        return bool(self._forwarder.received or self._codes)

    async def _run(self) -> None:
        self._changed = asyncio.Condition()
        try:
            await asyncio.gather(*map(self._work, self._sweep.slots))
        finally:
            self._line.close()

    async def _work(self, slot: Slot) -> None:
        """Run one job after the other in a slot."""
        while not self._is_interrupted:
            number = next(self._left, None)
            if number is None:
                return
            await self._run_job(number, slot)
            async with self._changed:
                self._changed.notify_all()

    async def _run_job(self, number: int, slot: Slot) -> None:
        """Run a job. Run it again if it fails and retries are left."""
        for _ in self._sweep.attempts(number):
            try:
                await self._attempt(number, slot)
                return
            except JobError:  # already recorded
                if self._is_interrupted:
                    return
            except RunError as error:  # the result lacks the metric
                self._sweep.record_failed(self._source.job(number), str(error), USER_ERROR)
                return

    async def _attempt(self, number: int, slot: Slot) -> None:
        prepared = self._prepare(number, slot)
        while isinstance(prepared, LocalJob) and self._has_running(prepared.launch.directory):
            log.info("job %d waits: another job has the same values", number + 1)
            async with self._changed:
                await self._changed.wait()
            if self._is_interrupted:
                return
            prepared = self._prepare(number, slot)
        if not isinstance(prepared, LocalJob):
            return
        self._running[slot] = prepared
        self._line.update()
        try:
            ended = await run_workers(
                prepared.launch, prepared.env, prepared.started_at, self._forwarder
            )
            self._conclude(prepared, ended)
        finally:
            del self._running[slot]
            self._line.update()

    def _has_running(self, directory: Path) -> bool:
        return any(local.launch.directory == directory for local in self._running.values())

    def _prepare(self, number: int, slot: Slot) -> LocalJob | float:
        """Prepare a job to start. Return its objective if it is complete.

        Raises:
            JobError: The configuration of the job is invalid. The failure is recorded.
        """
        sweep = self._sweep
        overrides = self._source.overrides(number)
        try:
            cfg = self._compose(number, overrides)
            config = checked_config(cfg)
            check_machine(config)
            return prepare_local(config, sweep.env, sweep, time.monotonic(), slot)
        except JobError:
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                error = ConfigError(explain(error))
            job = self._source.job(number)
            raise sweep.record_failed(job, str(error), USER_ERROR) from error

    def _conclude(self, local: LocalJob, ended: Ended) -> None:
        value = conclude_local(local, ended, self._sweep)
        number = local.job.number + 1
        seconds = time.monotonic() - local.started_at
        if value is None:
            self._codes.append(ended.code)
            log.info("job %d: interrupted after %.0f s", number, seconds)
            return
        self._sweep.record_done(local.job, local.launch.directory)
        title = objective_named(self._sweep.settings.metric).title
        is_pruned = read_result(local.launch.directory).get("status") == RunStatus.PRUNED
        how = "pruned, " if is_pruned else ""
        log.info("job %d: %s%s %.4f after %.0f s", number, how, title, value, seconds)
