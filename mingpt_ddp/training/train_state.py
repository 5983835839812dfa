"""The train state of a run: what a rollback restores, and what survives it."""

import time
from dataclasses import dataclass, field, fields
from typing import Annotated, TypeAlias

from pydantic import Field

from mingpt_ddp.config.keys.fields import NonNegativeFloat

Metrics: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=True)]]  # by name
OF_METRICS = ("train_metrics", "val_metrics", "loss_part_sums")  # fields of a train state


@dataclass
class Progress:
    """What a rollback restores. The data order and all random numbers follow from the step."""

    step: int = 0  # optimizer steps done
    train_loss: float | None = None  # mean of the last log interval
    val_loss: float | None = None
    val_metrics: Metrics = field(default_factory=dict)  # all of the evaluation, by name
    val_step: int | None = None  # of val_loss
    best_val_loss: float | None = None
    best_step: int | None = None
    wall_seconds: float = 0.0  # of all attempts, without work lost to a kill or a rollback
    loss_sum: float = 0.0  # of the current log interval
    # Sums of the task's several losses, if it has some, and the sums and counts of metrics.
    loss_part_sums: Metrics = field(default_factory=dict)
    loss_steps: int = 0
    timed_steps: int = 0  # all but the first of each attempt
    timed_seconds: float = 0.0  # of these, without evaluations and stalls
    # Mean seconds of a step in each timed block, until trainer.max_minutes is a number of steps.
    block_paces: list[NonNegativeFloat] = field(default_factory=list)
    stall_seconds: float = 0.0  # of wall_seconds, lost to stalls for snapshots
    saved_at: float = 0.0  # seconds since 1970, when the snapshot was taken
    loss_ema: float | None = None  # exponential moving average, to detect loss spikes
    patience_loss: float | None = None  # which an evaluation must get below, by trainer.min_delta
    evaluations_above: int = 0  # in a row that did not
    save_stall_s: NonNegativeFloat = 0.0  # of training for a snapshot, moving mean
    # The last snapshot took this long, from its start to its commit; None: unknown.
    save_durable_s: NonNegativeFloat | None = None
    train_metrics: Metrics = field(default_factory=dict)  # own ones, as train_loss


@dataclass
class TrainState(Progress):
    """The train state of a run, which all its parts share: its progress, and what survives it."""

    world_size: int = 1  # of the last attempt that trained
    wasted_seconds: float = 0.0  # starts, pauses and lost work since the first start
    consecutive_skips: int = 0  # up to this step
    skipped_steps: list[int] = field(default_factory=list)  # skipped after a rollback
    run_id: str = ""  # random, of rank zero: the run in trackers, over all attempts
    # trainer.max_minutes was divided by this; None: it has fixed no number of steps.
    step_seconds: float | None = None
    paced_at: int | None = None  # the step in which step_seconds was fixed

    @property
    def goodput(self) -> float:
        """The fraction of the time since the first start that is kept progress, 0 to 1."""
        kept = self.wall_seconds - self.stall_seconds
        total = self.wall_seconds + self.wasted_seconds
        # The clock may be set back between two attempts.
        return min(1.0, max(0.0, kept / max(total, 1e-9)))

    def begin_attempt(self, elapsed_s: float, first_start: float | None, is_own: bool) -> None:
        """Add the time until an attempt begins to train to `wasted_seconds`.

        Args:
            elapsed_s: Seconds since this attempt began.
            first_start: When the first attempt began to train, in seconds since 1970. None if this
                is the first one.
            is_own: True if the run resumes from a snapshot of its own.
        """
        now = time.time()
        if is_own:
            self.wasted_seconds += max(elapsed_s, now - self.saved_at)
        else:
            self.wasted_seconds = max(elapsed_s, now - (first_start or now) - self.wall_seconds)

    def roll_back(self, progress: Progress) -> None:
        """Return to the progress of a snapshot; the time since then is wasted."""
        self.wasted_seconds += self.wall_seconds - progress.wall_seconds
        for each in fields(Progress):
            setattr(self, each.name, getattr(progress, each.name))


def record_evaluation(state: TrainState, metrics: dict[str, float], min_delta: float) -> bool:
    """Record the metrics of an evaluation of this step; return whether its loss is the lowest."""
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
    """Return whether a run with this trainer.patience ends at this step."""
    if patience is None or state.step != state.val_step:
        return False
    return state.evaluations_above >= patience
