"""The train state of a run. A rollback restores one part of it, and keeps the other part."""

import time
from dataclasses import dataclass, field, fields
from typing import Annotated, TypeAlias

from pydantic import Field

from mingpt_ddp.config.keys.fields import NonNegativeFloat

Metrics: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=True)]]  # values by name
METRIC_FIELDS = ("train_metrics", "val_metrics", "loss_part_sums")  # fields of the type Metrics


@dataclass
class Progress:
    """The part of the train state that a rollback restores.

    The order of the data and all random numbers need no state: they follow from the step.
    """

    step: int = 0  # number of optimizer steps done
    train_loss: float | None = None  # mean training loss of the last log interval
    val_loss: float | None = None  # loss of the last evaluation
    val_metrics: Metrics = field(default_factory=dict)  # all metrics of the last evaluation
    val_step: int | None = None  # step at which val_loss was measured
    best_val_loss: float | None = None
    best_step: int | None = None  # step at which best_val_loss was measured
    # Time in all attempts (starts of the run), without the work that was lost to a kill or a
    # rollback.
    wall_seconds: float = 0.0
    # Sum of the training loss in the current log interval.
    loss_sum: float = 0.0
    # Sums over the current log interval, by name. They contain each loss, if the task has several
    # losses, and the sum and the count of each metric.
    loss_part_sums: Metrics = field(default_factory=dict)
    loss_steps: int = 0  # number of steps in the current log interval
    # Number of steps that were timed: all steps but the first ones of each attempt.
    timed_steps: int = 0
    # Time that the timed steps took, without evaluations and stalls.
    timed_seconds: float = 0.0
    # Mean duration of a step in each timed block, in seconds. Measured until trainer.max_minutes
    # becomes a number of steps.
    block_paces: list[NonNegativeFloat] = field(default_factory=list)
    stall_seconds: float = 0.0  # part of wall_seconds in which training waited for snapshots
    saved_at: float = 0.0  # time of the snapshot, in seconds since 1970
    loss_ema: float | None = None  # exponential moving average, to detect loss spikes
    # An evaluation counts as an improvement if its loss is below this value by more than
    # trainer.min_delta.
    patience_loss: float | None = None
    evaluations_above: int = 0  # number of evaluations in a row without such an improvement
    # Time that training waits for one snapshot, as a moving mean.
    save_stall_s: NonNegativeFloat = 0.0
    # Time from the start of the last save to its commit. None if no save has been measured.
    save_durable_s: NonNegativeFloat | None = None
    # Means of the task's own metrics in the last log interval.
    train_metrics: Metrics = field(default_factory=dict)


@dataclass
class TrainState(Progress):
    """The train state of a run, which all parts of the run share.

    It consists of the progress and of the fields below, which a rollback keeps.
    """

    world_size: int = 1  # number of ranks in the last attempt that trained
    # Time spent on starts, pauses and lost work since the first start.
    wasted_seconds: float = 0.0
    consecutive_skips: int = 0  # number of steps in a row that were skipped, up to this step
    skipped_steps: list[int] = field(default_factory=list)  # steps to skip after a rollback
    # Identifies the run at the trackers, in all attempts. Rank zero draws it at random.
    run_id: str = ""
    # trainer.max_minutes divided by this duration of a step is the number of steps. None if the
    # number is not fixed yet.
    step_seconds: float | None = None
    paced_at: int | None = None  # step in which step_seconds was fixed

    @property
    def goodput(self) -> float:
        """The fraction of the time since the first start that was spent on progress, 0 to 1."""
        productive = self.wall_seconds - self.stall_seconds
        total = self.wall_seconds + self.wasted_seconds
        # The clock may be set back between two attempts, so limit the result.
        return min(1.0, max(0.0, productive / max(total, 1e-9)))

    def begin_attempt(
        self, elapsed_s: float, first_start: float | None, has_own_snapshot: bool
    ) -> None:
        """Add the time until an attempt begins to train to `wasted_seconds`.

        Args:
            elapsed_s: Seconds since this attempt began.
            first_start: When the first attempt began to train, in seconds since 1970. None if this
                is the first one.
            has_own_snapshot: True if the run resumes from its own snapshot, and False if it begins
                or continues another run.
        """
        now = time.time()
        if has_own_snapshot:
            self.wasted_seconds += max(elapsed_s, now - self.saved_at)
        else:
            self.wasted_seconds = max(elapsed_s, now - (first_start or now) - self.wall_seconds)

    def roll_back(self, progress: Progress) -> None:
        """Return to the progress of a snapshot. The time since the snapshot counts as wasted."""
        self.wasted_seconds += self.wall_seconds - progress.wall_seconds
        for each in fields(Progress):
            setattr(self, each.name, getattr(progress, each.name))


def record_evaluation(state: TrainState, metrics: dict[str, float], min_delta: float) -> bool:
    """Record the metrics of an evaluation of this step. Return True if its loss is the lowest."""
    state.val_loss = metrics["loss"]
    state.val_metrics = metrics
    state.val_step = state.step
    improved = state.best_val_loss is None or state.val_loss < state.best_val_loss
    if improved:
        state.best_val_loss = state.val_loss
        state.best_step = state.step
    count_patience(state, min_delta)
    return improved


def count_patience(state: TrainState, min_delta: float) -> None:
    """Count the evaluation that `state` has just recorded, for trainer.patience."""
    assert state.val_loss is not None
    if state.patience_loss is None or state.val_loss < state.patience_loss - min_delta:
        state.patience_loss = state.val_loss
        state.evaluations_above = 0
    else:
        state.evaluations_above += 1


def has_stopped_early(state: TrainState, patience: int | None) -> bool:
    """Return True if trainer.patience ends the run at this step."""
    if patience is None or state.step != state.val_step:
        return False
    return state.evaluations_above >= patience
