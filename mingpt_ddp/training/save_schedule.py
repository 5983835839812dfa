"""When a run saves, and the time that its training has to wait for that."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import AwayError
from mingpt_ddp.metrics.processor import Journal
from mingpt_ddp.snapshots.manager import Saver
from mingpt_ddp.snapshots.train_state import Position
from mingpt_ddp.training.anomaly import Guard
from mingpt_ddp.training.save_interval import Cadence
from mingpt_ddp.training.train_step import Stepper

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Saves:
    """The snapshots of a run as its loop sees them. All ranks call the same methods at the same step."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        saver: Saver,
        stepper: Stepper,
        journal: Journal,
        position: Position,
        guard: Guard,
    ) -> None:
        """
        Args:
            position: of the run, now and in every snapshot.
            guard: lets no wreck be saved.
        """
        self.config, self.runtime, self.saver, self.stepper = config.snapshot, runtime, saver, stepper
        self.journal, self.position, self.guard = journal, position, guard
        self.cadence = Cadence(
            self.config.every_minutes, self.config.mtbf_hours if self.config.every_steps == "auto" else None
        )
        self._clock = time.perf_counter()
        self._wanted = False  # as soon as the one before is done

    def tick(self) -> Position:
        """The position, with the time until now."""
        now = time.perf_counter()
        self.position.wall_seconds += now - self._clock
        self._clock = now
        return self.position

    def before_update(self) -> None:
        """Wait until the weights may change."""
        self._stalled(self.saver.wait_for_copy)

    def behind(self, step: int, due: bool) -> None:
        """Save if it is time, as soon as the snapshot before is done; training does not wait for that.

        Args:
            due: by the clock of rank 0.
        """
        every = self.config.every_steps if isinstance(self.config.every_steps, int) else None
        per_epoch = self.stepper.loader.steps_per_epoch
        for steps in (every, self.config.every_epochs and self.config.every_epochs * per_epoch):
            due |= steps is not None and step % steps == 0
        self._wanted |= due
        if self._wanted and self._stalled(self.saver.is_free):
            self._stalled(self._begin)

    def save(self, last: bool) -> None:
        """Save this step, once the snapshot before is done.

        Args:
            last: wait until it is durable, and try again as often as failures are allowed.

        Raises:
            AwayError: it cannot be written, which is not tolerated any more.
        """

        def work() -> None:
            self.saver.finish()
            self._begin()
            if last:
                self.saver.insist(self.position.step, self._put_down)

        self._stalled(work)

    def save_in_time(self, elapsed: float) -> None:
        """Before the process is killed: a new snapshot if there is time for it, else the one that is under way.

        Args:
            elapsed: seconds since this rank was told to end.
        """
        left = self.config.grace_seconds - max(self.runtime.gather(elapsed))
        until = time.monotonic() + left
        self.saver.hurry(left / 2)
        needed = max(self.runtime.gather(self.saver.durable_s or 0.0))
        with contextlib.suppress(AwayError):  # it has failed too often: then the older one has to do
            while self.saver.finish(until) and self.saver.last_step != self.position.step:
                if not self.runtime.gather(until - time.monotonic() > needed)[0]:
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
        self.journal.meter.pause(seconds)
        self.position.stall_seconds += seconds
        self.cadence.stalled(seconds)
        return result

    def _begin(self) -> None:
        self._put_down()
        if not self.config.background:
            self.saver.finish()

    def _put_down(self) -> None:
        """Set out to save the state; the next step does not wait until it is written."""
        self.journal.board.flush()
        position = self.tick()
        position.loss_sum, position.loss_steps = self.journal.meter.state()
        self.guard.check(position.step, position.loss_sum, self.journal.meter.grad_norm(), position)
        self._wanted = False
        self.cadence.begun(self.saver.durable_s)
        if self.config.every_steps == "auto":
            log.info("the next snapshot is due in %.1f s", self.cadence.interval_s, extra={"file_only": True})
        stepper = self.stepper
        self.saver.begin(position, stepper.model, stepper.optimizer, stepper.plan.micro_batch_size)
