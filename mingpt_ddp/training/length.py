"""The number of optimizer steps of a run.

With trainer.max_minutes the number is not known at the start. Each step is then timed, from the
exchange of flags in one step to the exchange in the next step (step_flags.py). Evaluations, samples
and stalls for snapshots do not count. After a tenth of the minutes, the remaining minutes are
divided by the median duration of a step. This fixes the number of steps: from then on it does not
change, however long the steps take. The learning rate begins to decay when the number is known.
"""

import logging
import statistics
from dataclasses import replace
from typing import TypeVar

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import LIMITS, Config
from mingpt_ddp.config.keys.optimizer_config import DECAYING, OptimizerConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.metrics.meters import Meter
from mingpt_ddp.training.train_state import TrainState

log = logging.getLogger(__name__)

T = TypeVar("T", bound=OptimizerConfig)
# Before trainer.max_minutes becomes a number of steps, the run is timed for at least this fraction
# of the minutes, for the whole warm-up, and for this many steps.
MEASURED_FRACTION = 0.1
MIN_TIMED_STEPS = 10
# The steps are timed in blocks that take this fraction of trainer.max_minutes, or one step if that
# is longer.
BLOCK_FRACTION = 0.005
# The first steps of each start are slower, since caches fill and memory is allocated.
UNTIMED_STEPS = 2
# Stands for a number of steps that is not known yet. No run has as many steps, and a float64 holds
# the number exactly.
UNKNOWN_STEPS = 1 << 53


class RunLength:
    """Computes the number of optimizer steps of a run from its limits and its train state.

    The number may change during the run, so all other code reads it here when it needs it.
    """

    def __init__(
        self, config: Config, steps_per_epoch: int, state: TrainState | None = None
    ) -> None:
        """
        Args:
            config: The whole configuration, with the limits of the run.
            steps_per_epoch: Number of optimizer steps in an epoch.
            state: Train state of the run. None for a new run.
        """
        self.trainer = config.trainer
        self.optimizer = config.optimizer
        self.steps_per_epoch = steps_per_epoch
        self.state = state or TrainState()
        # The last step, if trainer.max_minutes was over before it became a number of steps. It is
        # not saved. If the user later allows more minutes, the number of steps is computed again.
        self.out_of_time_at: int | None = None
        # Only for a training loop of the user's own: the step at which the loop ended the run in an
        # earlier start. The loop may stop before any limit is reached.
        self.stopped_at: int | None = None
        if self.steps_from_pace(self.state.step) == self.state.step:
            self.out_of_time_at = self.state.step

    @property
    def limits(self) -> dict[str, int]:
        """The step at which each limit ends the run, by its key in `trainer`.

        Limits that are not set are left out.
        """
        trainer = self.trainer
        steps_by_limit = {}
        if trainer.max_steps is not None:
            steps_by_limit["max_steps"] = trainer.max_steps
        if trainer.max_epochs is not None:
            steps_by_limit["max_epochs"] = trainer.max_epochs * self.steps_per_epoch
        if self.out_of_time_at is not None:
            steps_by_limit["max_minutes"] = self.out_of_time_at
        elif trainer.max_minutes is not None and self.state.step_seconds is not None:
            steps_by_limit["max_minutes"] = round(
                60 * trainer.max_minutes / max(self.state.step_seconds, 1e-9)
            )
        return steps_by_limit

    @property
    def steps(self) -> int:
        """The number of steps of the run. Until trainer.max_minutes fixes it, an upper bound."""
        if self.stopped_at is not None:
            return self.stopped_at
        return min(self.limits.values(), default=UNKNOWN_STEPS)

    @property
    def is_fixed(self) -> bool:
        """True if the number of steps is known and does not change any more."""
        minutes_are_steps = self.state.step_seconds is not None or self.out_of_time_at is not None
        return self.trainer.max_minutes is None or minutes_are_steps

    @property
    def known_steps(self) -> int | None:
        """The number of steps of the run, or None until trainer.max_minutes fixes it."""
        return self.steps if self.is_fixed else None

    @property
    def block_s(self) -> float:
        """The minimal duration in seconds of a block of timed steps."""
        return BLOCK_FRACTION * 60 * (self.trainer.max_minutes or 0.0)

    def with_decay_from(self, optimizer: T) -> T:
        """Return the optimizer's configuration with the step at which the rate begins to decay.

        With trainer.max_minutes, the decay begins at the step that has fixed the number of steps,
        because the learning rates of earlier steps cannot depend on that number. Without it, or if
        the user has set where the decay begins or ends, the configuration stays as it is.
        """
        given = (optimizer.decay_from, optimizer.schedule_steps)
        if self.trainer.max_minutes is None or given != (None, None):
            return optimizer
        if optimizer.schedule not in DECAYING:
            return optimizer
        if self.state.step_seconds is None:
            return replace(optimizer, decay_from=UNKNOWN_STEPS)
        return replace(optimizer, decay_from=self.state.paced_at)

    @property
    def minutes(self) -> float:
        """The minutes that all steps so far have taken.

        Steps that were not timed are assumed to have taken as long as the mean of the timed steps.
        """
        return self._mean_s * self.state.step / 60

    @property
    def _mean_s(self) -> float:
        """The mean duration of the steps so far, in seconds."""
        state = self.state
        # A damaged snapshot may contain a number that is too large for a float.
        steps = min(state.timed_steps, UNKNOWN_STEPS)
        seconds = state.timed_seconds
        if steps <= 0:  # the snapshot is from a version that did not time steps
            steps = state.step
            seconds = state.wall_seconds
        return max(seconds, 1e-9) / max(1, steps)

    def steps_from_pace(self, step: int) -> int | None:
        """Compute the number of steps of the run from the time that the steps so far have taken.

        Return None if the number is fixed already, or if it is too early to fix it. Return the
        current step if the minutes are over.

        Args:
            step: Number of the current step.
        """
        state = self.state
        if self.is_fixed or not (state.timed_steps or state.wall_seconds):
            return None
        assert self.trainer.max_minutes is not None
        limit_s = 60 * self.trainer.max_minutes
        taken_s = self._mean_s * step
        if taken_s >= limit_s:
            return step
        has_warmup = self.optimizer.schedule_steps is None and self.optimizer.schedule != "constant"
        if has_warmup and step < self.optimizer.warmup_steps:
            return None
        if taken_s < MEASURED_FRACTION * limit_s:
            return None
        if 0 < state.timed_steps < MIN_TIMED_STEPS:
            return None
        return min(step + int((limit_s - taken_s) / self._median_s), UNKNOWN_STEPS)

    @property
    def _median_s(self) -> float:
        """The median duration of a step in seconds, which a pause of the machine hardly changes."""
        paces = self.state.block_paces
        return max(statistics.median(paces), 1e-9) if paces else self._mean_s

    def fix(self, steps: int, step: int) -> None:
        """Fix the number of steps.

        Args:
            steps: The number that `steps_from_pace` has returned in this step.
            step: Number of the current step.
        """
        minutes = self.trainer.max_minutes
        assert minutes is not None
        if steps == step:
            self.out_of_time_at = step
            lines = [f"trainer.max_minutes={minutes:g} is over: step {step} is the last"]
            if warmup := long_warmup_warning(self.optimizer, step):
                lines.append(warmup)
            log.warning("; ".join(lines))
            return
        self.state.step_seconds = 60 * minutes / steps
        self.state.paced_at = step
        pace = 1e3 * self._median_s
        log.info(
            "trainer.max_minutes=%g allows %d steps: a step takes %.4g ms", minutes, steps, pace
        )
        if end := early_end_notice(self.trainer, self.limits):
            log.info(end)

    def describe_time(self) -> str:
        """Describe how many minutes the steps have taken, for the log."""
        limit = f"trainer.max_minutes={self.trainer.max_minutes:g}"
        return f"trained {self.minutes:.3g} minutes of {limit}, in {self.state.step} steps"


def known_length(
    config: Config, steps_per_epoch: int, step_seconds: float | None = None
) -> RunLength:
    """Return the length of a run whose number of steps is known before it trains.

    Args:
        config: The whole configuration, with the limits of the run.
        steps_per_epoch: Number of optimizer steps in an epoch.
        step_seconds: Duration of a step, which trainer.max_minutes is divided by. None if it is
            not known.

    Raises:
        ConfigError: The number of steps depends on how long they take.
    """
    length = RunLength(config, steps_per_epoch, TrainState(step_seconds=step_seconds))
    check(
        length.is_fixed,
        "trainer.max_minutes works only if the steps are timed; set trainer.max_steps instead",
    )
    return length


class StepTimer:
    """Times the steps of one start of the run, and adds their durations to the train state."""

    def __init__(self, length: RunLength, meter: Meter) -> None:
        self.length = length
        self.meter = meter
        self.restart()

    def restart(self) -> None:
        """Begin again with untimed steps, at the start and after a rollback."""
        self._calls = 0
        self._since = 0.0
        self._block_since = 0.0
        self._block_steps = 0

    def record_step(self, step: int) -> int:
        """Add the time since the last call to the train state, unless this is an untimed step.

        Return the number of steps of the run if it can be fixed in this step, and 0 if not.
        """
        state = self.length.state
        is_fixed = self.length.is_fixed
        self._calls += 1
        # A GPU must have finished its queued work when a block of steps begins and when it ends.
        now = self.meter.clock(waits=self._calls == UNTIMED_STEPS and not is_fixed)
        if self._calls <= UNTIMED_STEPS:
            self._since = self._block_since = now
            return 0
        self._block_steps += 1
        ends_block = not is_fixed and now - self._block_since >= self.length.block_s
        if ends_block:
            now = self.meter.clock(waits=True)
            state.block_paces.append((now - self._block_since) / self._block_steps)
            self._block_since = now
            self._block_steps = 0
        state.timed_seconds += now - self._since
        state.timed_steps += 1
        self._since = now
        return (self.length.steps_from_pace(step) or 0) if ends_block else 0


def check_minutes(config: Config) -> None:
    """Refuse trainer.max_minutes with a schedule that needs the number of steps from the start.

    Raises:
        ConfigError: A schedule needs the number. The message names its key.
    """
    trainer = config.trainer
    optimizer = config.optimizer
    if trainer.max_minutes is None or optimizer.schedule_steps is not None:
        return
    given = f"trainer.max_minutes={trainer.max_minutes:g}"
    advice = "set optimizer.schedule_steps, or trainer.max_steps instead"
    can_wait_by_key = {
        "weight_decay_schedule": optimizer.weight_decay_schedule in ("constant", "lr"),
        "schedule": optimizer.schedule not in BUILDERS["schedule"],
    }
    for key, can_wait in can_wait_by_key.items():
        needed = f"optimizer.{key}={getattr(optimizer, key)} needs the number of steps at the start"
        check(can_wait, f"{needed}, but {given} fixes it during training; {advice}")


def long_warmup_warning(optimizer: OptimizerConfig, steps: int) -> str | None:
    """Return a warning if the learning rate never reaches its peak."""
    warmup = optimizer.warmup_steps
    length = optimizer.schedule_steps or steps
    if warmup <= length or optimizer.schedule in BUILDERS["schedule"]:
        return None
    return (
        f"the warm-up takes {warmup} of {length} steps; lower optimizer.warmup_steps to "
        "reach optimizer.lr"
    )


def early_end_notice(trainer: TrainerConfig, limits: dict[str, int]) -> str | None:
    """Return a notice if a limit ends the run before another limit that the user has set.

    Args:
        trainer: Configuration of the trainer.
        limits: The step at which each limit ends the run, by its key in `trainer`.
    """
    first = min(limits, key=lambda key: limits[key])
    for later in reversed(LIMITS):
        if later != "max_epochs" and limits.get(later, 0) > limits[first]:
            end = f"trainer.{first}={getattr(trainer, first)} ends the run at step {limits[first]}"
            before = f"trainer.{later}={getattr(trainer, later)}"
            return f"{end}, before {before}; set trainer.{first}=null to train on"
    return None
