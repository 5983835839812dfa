"""When a run saves, and the time that its training has to wait for that."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import StorageUnavailableError
from mingpt_ddp.metrics.processor import MetricsProcessor
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.train_state import TrainState
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.save_interval import SaveInterval
from mingpt_ddp.training.train_step import TrainStep

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class SaveSchedule:
    """The snapshots of a run as its loop sees them. All ranks call the same methods at the same step."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        saver: SnapshotManager,
        train_step: TrainStep,
        metrics: MetricsProcessor,
        position: TrainState,
        anomaly: AnomalyPolicy,
    ) -> None:
        """
        Args:
            position: of the run, now and in every snapshot.
            anomaly: lets no wreck be saved.
        """
        self.config, self.runtime, self.saver, self.train_step = config.snapshot, runtime, saver, train_step
        self.metrics, self.position, self.anomaly = metrics, position, anomaly
        self.save_interval = SaveInterval(
            self.config.every_minutes, self.config.mtbf_hours if self.config.every_steps == "auto" else None
        )
        self._clock = time.perf_counter()
        self._wanted = False  # as soon as the one before is done

    def update_wall_time(self) -> TrainState:
        """The position, with the time until now."""
        now = time.perf_counter()
        self.position.wall_seconds += now - self._clock
        self._clock = now
        return self.position

    def wait_for_staging(self) -> None:
        """Wait until the weights may change."""
        self._stalled(self.saver.wait_for_staging)

    def maybe_save(self, step: int, due: bool) -> None:
        """Save if it is time, as soon as the snapshot before is done; training does not wait for that.

        Args:
            due: by the clock of rank 0.
        """
        every = self.config.every_steps if isinstance(self.config.every_steps, int) else None
        per_epoch = self.train_step.loader.steps_per_epoch
        for steps in (every, self.config.every_epochs and self.config.every_epochs * per_epoch):
            due |= steps is not None and step % steps == 0
        self._wanted |= due
        if self._wanted and self._stalled(self.saver.can_start):
            self._stalled(self._begin)

    def save(self, last: bool) -> None:
        """Save this step, once the snapshot before is done.

        Args:
            last: wait until it is durable, and try again as often as failures are allowed.

        Raises:
            StorageUnavailableError: it cannot be written, which is not tolerated any more.
        """

        def work() -> None:
            self.saver.wait()
            self._begin()
            if last:
                self.saver.save_with_retries(self.position.step, self._put_down)

        self._stalled(work)

    def save_on_preemption(self, elapsed: float) -> None:
        """Before the process is killed: a new snapshot if there is time for it, else the one that is under way.

        Args:
            elapsed: seconds since this rank was told to end.
        """
        left = self.config.grace_seconds - max(self.runtime.group.all_gather(elapsed))
        until = time.monotonic() + left
        self.saver.set_deadline(left / 2)
        needed = max(self.runtime.group.all_gather(self.saver.durable_s or 0.0))
        with contextlib.suppress(StorageUnavailableError):  # it has failed too often: then the older one has to do
            while self.saver.wait(until) and self.saver.last_step != self.position.step:
                if not self.runtime.group.all_gather(until - time.monotonic() > needed)[0]:
                    break
                self._put_down()
        step = self.saver.last_step
        if step == self.position.step:
            log.info("preempted at step %d; the same command goes on from there", step)
        else:
            last = "there is no snapshot yet" if step is None else f"the last one is that of step {step}"
            log.warning("preempted at step %d without time for a snapshot: %s", self.position.step, last)

    def _stalled(self, wait: Callable[[], Result]) -> Result:
        """Do what training has to wait for, and take the time."""
        begin = time.perf_counter()
        result = wait()
        seconds = time.perf_counter() - begin
        self.metrics.meter.pause(seconds)
        self.position.stall_seconds += seconds
        self.save_interval.stalled(seconds)
        return result

    def _begin(self) -> None:
        self._put_down()
        if not self.config.background:
            self.saver.wait()

    def _put_down(self) -> None:
        """Set out to save the state; the next step does not wait until it is written."""
        self.metrics.flush()
        position = self.update_wall_time()
        position.loss_sum, position.loss_steps = self.metrics.meter.state()
        self.anomaly.check(position.step, position.loss_sum, self.metrics.meter.grad_norm(), position)
        self._wanted = False
        self.save_interval.begun(self.saver.durable_s)
        if self.config.every_steps == "auto":
            log.info("the next snapshot is due in %.1f s", self.save_interval.interval_s, extra={"file_only": True})
        train_step = self.train_step
        self.saver.save(position, train_step.model, train_step.optimizer, train_step.plan.micro_batch_size)
