"""Decide when a run saves a snapshot, and measure how much training time the snapshot costs.

All times are in seconds.

The interval between snapshots is computed from these assumptions. Failures are a Poisson process,
with one failure in `mtbf_s` (snapshot.mtbf_hours) on average, also during restarts. Training runs
for an interval, waits `cost_s` for a snapshot, and continues. A failure loses all training since
the start of the last snapshot that is durable (committed). Then the best interval depends neither
on the time until a snapshot is durable, nor on the duration of a restart:
benchmarks/availability.py has the formula. The CPU time of the threads that save is not measured.
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

# The first snapshot of a run measures its cost, so it is taken after at most this much training.
FIRST_INTERVAL_S = 30.0
# Cost of a snapshot until it has been measured. FIRST_INTERVAL_S is the best interval for this cost
# and one failure a day.
ASSUMED_COST_S = 0.0053
# An interval is at least this many times as long as a snapshot costs. A run that fails very often
# therefore still makes progress.
MIN_INTERVAL_IN_COSTS = 10
NEWEST_COST_WEIGHT = 0.25  # weight of the newest snapshot in the moving mean of the cost


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Return the time of training between two snapshots that loses the least time overall.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        cost_s: Time for which training waits for one snapshot. The asynchronous write does not
            count.
        mtbf_s: Mean time between failures of the whole run. With n nodes this is 1/n of the mean
            time of a single node.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def automatic_interval(cost_s: float, mtbf_s: float, durable_s: float) -> float:
    """Return Young's interval, or a longer one if snapshots would take up too much time.

    Args:
        cost_s: Time for which training waits for one snapshot.
        mtbf_s: Mean time between failures of the whole run.
        durable_s: Time from the start of a save to its commit. Saves do not overlap.
    """
    return max(young_interval(cost_s, mtbf_s), durable_s, MIN_INTERVAL_IN_COSTS * cost_s)


class SaveSchedule:
    """Saves a snapshot when the configuration, a signal or the end of the run requires it.

    All ranks must call the same methods at the same step.
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
        self._intervals_in_steps: list[int] = []
        if isinstance(self.snapshot.every_steps, int):
            self._intervals_in_steps.append(self.snapshot.every_steps)
        if self.snapshot.every_epochs:
            self._intervals_in_steps.append(self.snapshot.every_epochs * run.length.steps_per_epoch)
        # An interval begins with a snapshot and ends with the next one. With every_steps=auto this
        # is its length, in seconds.
        self._interval_s = self._best_interval()
        self._interval_start = time.monotonic()
        self._interval_stall_s = 0.0  # time in this interval for which training waited
        # Step of the last snapshot whose cost has been recorded.
        self._cost_recorded_step: int | None = None
        # The train state contains the time until this moment.
        self._counted_until = time.perf_counter()
        self._is_pending = False  # True if a snapshot is due, but could not begin yet

    def begin(self) -> None:
        """Begin to train. The time since this object was made counts as part of the start."""
        now = time.perf_counter()
        self.state.wasted_seconds += now - self._counted_until
        self._counted_until = now
        self._interval_start = time.monotonic()

    def update_wall_time(self) -> TrainState:
        """Add the time since the last call to the train state. Return the train state."""
        now = time.perf_counter()
        self.state.wall_seconds += now - self._counted_until
        self._counted_until = now
        return self.state

    def take_result(self) -> None:
        """Take the result of a save that has ended on all ranks.

        The first result of a run gives the first measurement of the cost.
        """
        self.manager.wait()
        if self.state.save_durable_s is None and self.manager.durable_s is not None:
            self._record_cost()
            self._interval_s = self._best_interval()

    def is_due(self) -> bool:
        """Return True if a snapshot is due by this rank's clock."""
        elapsed = time.monotonic() - self._interval_start
        if self.snapshot.every_steps == "auto" and elapsed >= self._interval_s:
            return True
        minutes = self.snapshot.every_minutes
        return minutes is not None and elapsed >= 60 * minutes

    def wait_for_staging(self) -> None:
        """Wait until the save in progress has copied the tensors. Then the weights may change.

        The time for which the GPU still computes does not count as a stall. If no tensors are being
        copied, this returns at once and does not wait for the GPU.
        """
        if not self.manager.is_staging:
            return
        with self._stall():
            self.manager.wait_for_staging()

    def maybe_save(self, is_due: bool) -> None:
        """Save if a snapshot is due. If another save is in progress, save at a later step.

        Args:
            is_due: True if a snapshot is due by the clock of rank zero.
        """
        step = self.state.step
        keep_every = self.snapshot.keep_every
        # snapshot.keep_every names exactly this step. So wait for the save in progress instead of
        # saving at a later step.
        if keep_every and step % keep_every == 0:
            self.save()
            return
        if is_due or any(step % every == 0 for every in self._intervals_in_steps):
            self._is_pending = True
        if not self._is_pending:
            return
        until = self.manager.quick_deadline
        # After the deadline, `wait` does not wait for the save, and only says whether it has
        # finished. So there is no stall to measure, and `_stall` would wait for the GPU without
        # need.
        waits = time.monotonic() < until
        with self._stall() if waits else contextlib.nullcontext():
            can_start = self.manager.wait(until=until)
        if not can_start:
            return
        with self._stall():
            self.manager.save(self._run_state())
            if not self.snapshot.background:
                self.manager.wait()

    def save(self) -> None:
        """Wait for the save in progress, and start to save this step."""
        with self._stall():
            self.manager.wait()
            self.manager.save(self._run_state())
            if not self.snapshot.background:
                self.manager.wait()

    def commit(self) -> None:
        """Wait until this step is saved. Retry after a failure, up to snapshot.max_failures times.

        Raises:
            StorageUnavailableError, StorageUnusableError: More saves have failed than
                snapshot.max_failures allows.
        """
        with self._stall():
            self.manager.wait()
            while self.manager.last_step != self.state.step:
                self.manager.save(self._run_state())
                self.manager.wait()
        self.update_wall_time()

    def save_on_preemption(self, elapsed_s: float) -> None:
        """Save this step before the grace period ends, if there is enough time.

        If not, only wait for the save in progress.

        Args:
            elapsed_s: Time since this rank has received the signal.
        """
        group = self.run.runtime.group
        step = self.state.step
        left = self.snapshot.grace_seconds - max(group.all_gather(elapsed_s))
        until = time.monotonic() + left
        needed = max(group.all_gather(self.manager.durable_s or 0.0))
        # If the save fails, the run will resume from an older snapshot.
        with contextlib.suppress(StorageUnavailableError, StorageUnusableError):
            while self.manager.wait(until) and self.manager.last_step != step:
                if not group.all_gather(until - time.monotonic() > needed)[0]:
                    break
                self.manager.save(self._run_state())
        older = self.manager.last_step
        if older == step:
            log.info("preempted at step %d; rerun the same command to resume", step)
            return
        newest = "there is no snapshot yet"
        if older is not None:
            newest = f"the newest one is from step {older}"
        log.warning("preempted at step %d without time for a snapshot: %s", step, newest)

    def restore_latest(self) -> TrainState | None:
        """Load the newest snapshot. Return its train state, or None if there is no snapshot."""
        self.manager.wait()
        return restore_newest(self.manager, self.run.task, self.run.trainable)

    @contextlib.contextmanager
    def _stall(self) -> Iterator[None]:
        """Count the time in this context as a stall, in which training waits for a snapshot.

        The GPU first finishes its queued work, which still counts as training.
        """
        with self.meter.paused() as pause:
            yield
        self.state.stall_seconds += pause.seconds
        self._interval_stall_s += pause.seconds

    def _run_state(self) -> RunState:
        """Collect the state of the run for a snapshot.

        Raises:
            TrainingError: The loss is not finite. Such a state is not saved.
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
        """Begin the interval until the next snapshot. With every_steps=auto, choose its length."""
        self._is_pending = False
        self._record_cost()
        if self.snapshot.every_steps == "auto":
            self._interval_s = self._best_interval()
            log.info(
                "the next snapshot is due in %.1f s", self._interval_s, extra={"file_only": True}
            )
        self._interval_start = time.monotonic()
        self._interval_stall_s = 0.0

    def _record_cost(self) -> None:
        """Record the cost of the last snapshot in the train state.

        Count each committed snapshot once. A failed save does not count.
        """
        state = self.state
        last_step = self.manager.last_step
        if self.manager.durable_s is None or last_step == self._cost_recorded_step:
            return
        self._cost_recorded_step = last_step
        weight = NEWEST_COST_WEIGHT
        if state.save_durable_s is None:  # this is the first measurement
            weight = 1.0
        state.save_stall_s += weight * (self._interval_stall_s - state.save_stall_s)
        state.save_durable_s = self.manager.durable_s

    def _best_interval(self) -> float:
        """Return the best interval between snapshots, given the measured cost of a snapshot."""
        state = self.state
        mtbf_s = 3600 * self.snapshot.mtbf_hours
        if state.save_durable_s is None:
            return min(FIRST_INTERVAL_S, young_interval(ASSUMED_COST_S, mtbf_s))
        return automatic_interval(state.save_stall_s, mtbf_s, state.save_durable_s)
