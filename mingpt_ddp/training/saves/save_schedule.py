"""Decide when a run saves, and measure what that costs its training.

All times are in seconds.

The model: failures are a Poisson process, with one failure in `mtbf_s` (snapshot.mtbf_hours) on
average, also during restarts. Training runs for an interval, loses `cost_s` to a snapshot, and
continues. A failure loses all training since the start of the last durable snapshot. The best
interval depends neither on the time until a snapshot becomes durable nor on the time of a restart:
benchmarks/availability.py has the formula. The CPU time of the threads of a save is not measured.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator

from mingpt_ddp.config.builders import code_roots
from mingpt_ddp.errors import StorageUnavailableError, StorageUnusableError
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.snapshots.manager import RunState
from mingpt_ddp.storage.code_identity import with_loaded_files
from mingpt_ddp.training.anomaly import AnomalyPolicy
from mingpt_ddp.training.saves.resume import restore_newest, snapshot_state
from mingpt_ddp.training.train_state import TrainState
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainable import Run

log = logging.getLogger(__name__)

FIRST_S = 30.0  # of training at most before the first snapshot of a run, which measures the cost
LEAST_COSTS = 10  # times its cost between two snapshots: however often a run fails, it goes on
NEWEST_SAVE = 0.25  # weight of the newest snapshot in the mean cost
ASSUMED_COST_S = 0.0053  # until then: FIRST_S is the best interval at one failure a day


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two snapshots that lose the least time.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        cost_s: how long training stalls for one snapshot, not how long the asynchronous write
            takes.
        mtbf_s: mean time between failures of the whole run, that of one node divided by the number
            of nodes.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def automatic_interval(cost_s: float, mtbf_s: float, durable_s: float) -> float:
    """Return Young's interval, or one that leaves most of the time to training.

    Args:
        durable_s: from the start of a save to its commit: saves do not overlap.
    """
    return max(young_interval(cost_s, mtbf_s), durable_s, LEAST_COSTS * cost_s)


class SaveSchedule:
    """Save when the configuration, a signal or the end of the run requires it.

    All ranks call the same methods at the same step.
    """

    def __init__(
        self,
        run: Run,
        train_step: TrainStep,
        meter: Meter,
        anomaly: AnomalyPolicy,
    ) -> None:
        self.run = run
        self.state = run.state
        self.snapshot = run.config.snapshot
        self.manager = run.snapshots
        self.train_step = train_step
        self.meter = meter
        self.anomaly = anomaly
        self._every: list[int] = []  # steps
        if isinstance(self.snapshot.every_steps, int):
            self._every.append(self.snapshot.every_steps)
        if self.snapshot.every_epochs:
            self._every.append(self.snapshot.every_epochs * run.length.steps_per_epoch)
        self._interval_s = self._best_interval()  # with every_steps=auto
        self._since = time.monotonic()  # of the last snapshot
        self._stall_s = 0.0  # since the last snapshot was taken
        self._recorded_step: int | None = None  # of the last snapshot whose cost is recorded
        self._clock = time.perf_counter()
        self._is_pending = False  # a snapshot is due, and has not begun

    def begin(self) -> None:
        """Begin to train: the time since this object was made was a part of the start."""
        now = time.perf_counter()
        self.state.wasted_seconds += now - self._clock
        self._clock = now
        self._since = time.monotonic()

    def update_wall_time(self) -> TrainState:
        """Add the time since the last call to the train state; return the train state."""
        now = time.perf_counter()
        self.state.wall_seconds += now - self._clock
        self._clock = now
        return self.state

    def take_result(self) -> None:
        """Take the result of a save that has ended on all ranks; the first measures the cost."""
        self.manager.wait()
        if self.state.save_durable_s is None and self.manager.durable_s is not None:
            self._record_cost()
            self._interval_s = self._best_interval()

    def is_due(self) -> bool:
        """Return whether a snapshot is due by this rank's clock."""
        elapsed = time.monotonic() - self._since
        if self.snapshot.every_steps == "auto" and elapsed >= self._interval_s:
            return True
        minutes = self.snapshot.every_minutes
        return minutes is not None and elapsed >= 60 * minutes

    def wait_for_staging(self) -> None:
        """Wait until the tensors are staged, so that the weights may change.

        What a GPU computes meanwhile is no stall; nor does the host wait for it unless the tensors
        are being staged.
        """
        if not self.manager.is_staging:
            return
        with self._stall():
            self.manager.wait_for_staging()

    def maybe_save(self, is_due: bool) -> None:
        """Save if a snapshot is due, or as soon as the save in progress has finished.

        Args:
            is_due: whether one is due by rank zero's clock.
        """
        step = self.state.step
        keep_every = self.snapshot.keep_every
        if keep_every and step % keep_every == 0:  # a milestone is of no other step
            self.save()
            return
        if is_due or any(step % every == 0 for every in self._every):
            self._is_pending = True
        if not self._is_pending:
            return
        until = self.manager.quick_deadline
        waits = time.monotonic() < until  # else it only asks, which is no reason to wait for a GPU
        with self._stall() if waits else contextlib.nullcontext():
            can_start = self.manager.wait(until=until)
        if not can_start:
            return
        with self._stall():
            self.manager.save(self._capture())
            if not self.snapshot.background:
                self.manager.wait()

    def save(self) -> None:
        """Start to save this step, after the save in progress."""
        with self._stall():
            self.manager.wait()
            self.manager.save(self._capture())
            if not self.snapshot.background:
                self.manager.wait()

    def commit(self) -> None:
        """Wait until this step is saved, and retry as often as failures are allowed.

        Raises:
            StorageUnavailableError, StorageUnusableError: snapshot.max_failures are exceeded.
        """
        with self._stall():
            self.manager.wait()
            while self.manager.last_step != self.state.step:
                self.manager.save(self._capture())
                self.manager.wait()
        self.update_wall_time()

    def save_on_preemption(self, elapsed_s: float) -> None:
        """Save within the grace period if there is time; else wait for the save in progress.

        Args:
            elapsed_s: since this rank's signal.
        """
        group = self.run.runtime.group
        step = self.state.step
        left = self.snapshot.grace_seconds - max(group.all_gather(elapsed_s))
        until = time.monotonic() + left
        needed = max(group.all_gather(self.manager.durable_s or 0.0))
        # Resume from the older snapshot.
        with contextlib.suppress(StorageUnavailableError, StorageUnusableError):
            while self.manager.wait(until) and self.manager.last_step != step:
                if not group.all_gather(until - time.monotonic() > needed)[0]:
                    break
                self.manager.save(self._capture())
        older = self.manager.last_step
        if older == step:
            log.info("preempted at step %d; rerun the same command to resume", step)
            return
        last = "there is no snapshot yet" if older is None else f"the last one is of step {older}"
        log.warning("preempted at step %d without time for a snapshot: %s", step, last)

    def restore_latest(self) -> TrainState | None:
        """Load the newest snapshot, if any, into what is trained; return its TrainState."""
        self.manager.wait()
        return restore_newest(self.manager, self.run.task, self.run.trainable)

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        """Count the time in this context as a stall of training.

        It begins when a GPU has done what is queued: that is training.
        """
        with self.meter.paused() as pause:
            yield
        self.state.stall_seconds += pause.seconds
        self._stall_s += pause.seconds

    def _capture(self) -> RunState:
        """Return what to save of this step.

        Raises:
            TrainingError: the loss is not finite; such a state is not saved.
        """
        state = self.update_wall_time()
        meter = self.meter
        sums, state.loss_steps = meter.state()
        state.loss_sum = sums.pop("loss")
        state.loss_part_sums = sums
        self.anomaly.check(state.step, state.loss_sum, float(meter.grad_norm))
        self._begin_interval()
        values = snapshot_state(
            state,
            self.run.runtime,
            self.run.task,
            self.train_step.plan,
            self.train_step.steps,
        )
        values["code"] = with_loaded_files(self.run.code, code_roots())
        return RunState(state.step, values, self.run.trainable.tensors(), state.best_step)

    def _begin_interval(self) -> None:
        """Begin the interval to the next snapshot; with every_steps=auto choose its length."""
        self._is_pending = False
        self._record_cost()
        if self.snapshot.every_steps == "auto":
            self._interval_s = self._best_interval()
            log.info(
                "the next snapshot is due in %.1f s", self._interval_s, extra={"file_only": True}
            )
        self._since = time.monotonic()
        self._stall_s = 0.0

    def _record_cost(self) -> None:
        """Record what the last snapshot has cost, for this attempt and the next.

        Each that was committed counts once: that of a failed save is another.
        """
        state = self.state
        last_step = self.manager.last_step
        if self.manager.durable_s is None or last_step == self._recorded_step:
            return
        self._recorded_step = last_step
        weight = 1.0 if state.save_durable_s is None else NEWEST_SAVE  # 1: it is the first
        state.save_stall_s += weight * (self._stall_s - state.save_stall_s)
        state.save_durable_s = self.manager.durable_s

    def _best_interval(self) -> float:
        """Return the best interval for the cost of a snapshot."""
        state = self.state
        mtbf_s = 3600 * self.snapshot.mtbf_hours
        if state.save_durable_s is None:
            return min(FIRST_S, young_interval(ASSUMED_COST_S, mtbf_s))
        return automatic_interval(state.save_stall_s, mtbf_s, state.save_durable_s)
