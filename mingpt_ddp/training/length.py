"""The number of optimizer steps of a run, which trainer.max_minutes fixes while it trains.

Until then each step is timed, from the exchange of flags in one step to that in the next, without
what the meters leave out: evaluations, samples, stalls for snapshots. After a tenth of the minutes,
the median pace makes steps of those that are left. From then on the run has that many steps,
however long they take. The learning rate begins to decay when the number is known.
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
# The pace is measured over this fraction of trainer.max_minutes, and over the whole warm-up.
MEASURED_FRACTION = 0.1
# The steps are timed in blocks of this fraction of trainer.max_minutes, or of one longer step.
BLOCK_FRACTION = 0.005
LEAST_TIMED_STEPS = 10  # before trainer.max_minutes becomes a number of steps
FIRST_STEPS = 2  # steps of each start that are not timed: caches fill, memory is allocated
UNKNOWN = 1 << 53  # steps: more than any run has; a float64 holds it


class RunLength:
    """The number of optimizer steps of a run, by its limits and its train state.

    All that needs the number asks here, when it needs it.
    """

    def __init__(
        self, config: Config, steps_per_epoch: int, state: TrainState | None = None
    ) -> None:
        """
        Args:
            state: of the run; None: a new one.
        """
        self.trainer = config.trainer
        self.optimizer = config.optimizer
        self.steps_per_epoch = steps_per_epoch
        self.state = state or TrainState()
        # the last step, if trainer.max_minutes was over before it became a number; never recorded,
        # so that more minutes are reckoned from the time of the steps
        self.over_at: int | None = None
        # The step at which the loop of a script ended the run in an earlier start, perhaps before
        # the limits. None for the loop of main.py.
        self.stopped_at: int | None = None
        if self.reckon(self.state.step) == self.state.step:
            self.over_at = self.state.step

    @property
    def limits(self) -> dict[str, int]:
        """The steps at which each of the limits that are set ends the run, by key."""
        trainer = self.trainer
        steps_by_limit = {}
        if trainer.max_steps is not None:
            steps_by_limit["max_steps"] = trainer.max_steps
        if trainer.max_epochs is not None:
            steps_by_limit["max_epochs"] = trainer.max_epochs * self.steps_per_epoch
        if self.over_at is not None:
            steps_by_limit["max_minutes"] = self.over_at
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
        return min(self.limits.values(), default=UNKNOWN)

    @property
    def is_fixed(self) -> bool:
        """Whether the number is known."""
        given = self.state.step_seconds is not None or self.over_at is not None
        return self.trainer.max_minutes is None or given

    @property
    def known_steps(self) -> int | None:
        """The number of steps; None until it is fixed."""
        return self.steps if self.is_fixed else None

    @property
    def block_s(self) -> float:
        """The least seconds of a block of steps that is timed."""
        return BLOCK_FRACTION * 60 * (self.trainer.max_minutes or 0.0)

    def with_decay_from(self, optimizer: T) -> T:
        """Return the configuration with the step from which the learning rate decays.

        With trainer.max_minutes this is the step that has fixed the number of steps, because the
        rate of no earlier step may depend on that number.
        """
        given = (optimizer.decay_from, optimizer.schedule_steps)
        if self.trainer.max_minutes is None or given != (None, None):
            return optimizer
        if optimizer.schedule not in DECAYING:
            return optimizer
        if self.state.step_seconds is None:
            return replace(optimizer, decay_from=UNKNOWN)
        return replace(optimizer, decay_from=self.state.paced_at)

    @property
    def minutes(self) -> float:
        """The minutes that all steps so far have taken. The untimed ones count as the mean."""
        return self._mean_s * self.state.step / 60

    @property
    def _mean_s(self) -> float:
        """The mean seconds of a step so far."""
        state = self.state
        steps = min(state.timed_steps, UNKNOWN)  # it may be a stranger's
        seconds = state.timed_seconds
        if steps <= 0:  # of a version that timed no steps
            steps = state.step
            seconds = state.wall_seconds
        return max(seconds, 1e-9) / max(1, steps)

    def reckon(self, step: int) -> int | None:
        """Return the number of steps if the time so far fixes it in this step, else None.

        If the minutes are over, this step is the last one.
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
        if 0 < state.timed_steps < LEAST_TIMED_STEPS:
            return None
        return min(step + int((limit_s - taken_s) / self._median_s), UNKNOWN)

    @property
    def _median_s(self) -> float:
        """The median seconds of a step: a pause of the machine counts little."""
        paces = self.state.block_paces
        return max(statistics.median(paces), 1e-9) if paces else self._mean_s

    def fix(self, steps: int, step: int) -> None:
        """Fix the number of steps.

        Args:
            steps: The number that `reckon` has returned in this step.
        """
        minutes = self.trainer.max_minutes
        assert minutes is not None
        if steps == step:
            self.over_at = step
            lines = [f"trainer.max_minutes={minutes:g} is over: step {step} is the last"]
            if warmup := long_warmup(self.optimizer, step):
                lines.append(warmup)
            log.warning("; ".join(lines))
            return
        self.state.step_seconds = 60 * minutes / steps
        self.state.paced_at = step
        pace = 1e3 * self._median_s
        log.info("trainer.max_minutes=%g is %d steps: a step takes %.4g ms", minutes, steps, pace)
        if end := early_end(self.trainer, self.limits):
            log.info(end)

    def describe_time(self) -> str:
        """Return the minutes that the steps have taken, beside trainer.max_minutes."""
        limit = f"trainer.max_minutes={self.trainer.max_minutes:g}"
        return f"trained {self.minutes:.3g} minutes of {limit}, in {self.state.step} steps"


def known_length(
    config: Config, steps_per_epoch: int, step_seconds: float | None = None
) -> RunLength:
    """Return the length of a run whose steps are not timed.

    Args:
        step_seconds: of a step, for trainer.max_minutes; None: unknown.

    Raises:
        ConfigError: it depends on their time.
    """
    length = RunLength(config, steps_per_epoch, TrainState(step_seconds=step_seconds))
    check(length.is_fixed, "trainer.max_minutes needs timed steps; set trainer.max_steps instead")
    return length


class StepTimer:
    """Time the steps of an attempt into the train state."""

    def __init__(self, length: RunLength, meter: Meter) -> None:
        self.length = length
        self.meter = meter
        self.restart()

    def restart(self) -> None:
        """Begin again, as after a rollback."""
        self._calls = 0
        self._since = 0.0
        self._block_since = 0.0
        self._block_steps = 0

    def take(self, step: int) -> int:
        """Take the time in this step; return the number of steps that it fixes, 0 if none."""
        state = self.length.state
        is_fixed = self.length.is_fixed
        self._calls += 1
        # A GPU must have done its queued work where a block of steps begins and ends.
        now = self.meter.clock(waits=self._calls == FIRST_STEPS and not is_fixed)
        if self._calls <= FIRST_STEPS:
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
        return (self.length.reckon(step) or 0) if ends_block else 0


def check_minutes(config: Config) -> None:
    """Refuse trainer.max_minutes where a rate needs the number of steps before it is fixed.

    Raises:
        ConfigError: names the key.
    """
    trainer = config.trainer
    optimizer = config.optimizer
    if trainer.max_minutes is None or optimizer.schedule_steps is not None:
        return
    given = f"trainer.max_minutes={trainer.max_minutes:g}"
    advice = "set optimizer.schedule_steps, or trainer.max_steps instead"
    may_waits = {
        "weight_decay_schedule": optimizer.weight_decay_schedule in ("constant", "lr"),
        "schedule": optimizer.schedule not in BUILDERS["schedule"],
    }
    for key, may_wait in may_waits.items():
        needed = f"optimizer.{key}={getattr(optimizer, key)} needs the number of steps at once"
        check(may_wait, f"{needed}, which {given} fixes later; {advice}")


def long_warmup(optimizer: OptimizerConfig, steps: int) -> str | None:
    """Return a warning if the learning rate never reaches its peak."""
    warmup = optimizer.warmup_steps
    length = optimizer.schedule_steps or steps
    if warmup <= length or optimizer.schedule in BUILDERS["schedule"]:
        return None
    return (
        f"the warm-up takes {warmup} of {length} steps; lower optimizer.warmup_steps to "
        "reach optimizer.lr"
    )


def early_end(trainer: TrainerConfig, limits: dict[str, int]) -> str | None:
    """Return a notice if one limit ends the run before another that is not the default.

    Args:
        limits: in steps, by key.
    """
    first = min(limits, key=lambda key: limits[key])
    for other in reversed(LIMITS):
        if other != "max_epochs" and limits.get(other, 0) > limits[first]:
            end = f"trainer.{first}={getattr(trainer, first)} ends the run at step {limits[first]}"
            before = f"trainer.{other}={getattr(trainer, other)}"
            return f"{end}, before {before}; set it to null to continue"
    return None
