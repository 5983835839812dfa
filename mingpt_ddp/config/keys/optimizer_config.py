"""The keys of the optimizers, which users can extend with a Python file."""

# ruff: noqa: RUF009  key() returns a dataclass field
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mingpt_ddp.config.keys.components import UserCodeConfig
from mingpt_ddp.config.keys.fields import (
    DecayFactor,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    key,
)
from mingpt_ddp.config.validation import build, check, check_choice


@dataclass(frozen=True)
class ScheduleConfig:
    """The keys of a schedule of your own: optimizer.schedule_settings."""


# The registered values of optimizer.schedule.
SCHEDULES: dict[str | None, type] = dict.fromkeys(
    ("cosine", "linear", "wsd", "constant"), ScheduleConfig
)

# The schedules that use optimizer.decay_from: their learning rate decays after this step.
DECAYING = ("cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(UserCodeConfig):
    """The keys of every optimizer: learning rate, weight decay and schedule (mingpt_ddp/optim)."""

    # A rate outside these bounds is doubtful.
    usual_lr: ClassVar[tuple[float, float]] = (0.0, math.inf)
    # A step needs whole matrices, so that no strategy may split them.
    needs_whole_matrices: ClassVar[bool] = False

    name: str = key(..., "the registered optimizer to build: adamw, muon, sgd or your own")
    lr: LearningRate = key(
        1e-3, "learning rate at the peak of the schedule; muon's is for matrices"
    )
    weight_decay: Annotated[NonNegativeFloat, Field(le=1e6)] = key(
        0.1, "of matrices; vectors are not decayed"
    )
    schedule: str = key(
        "cosine", "how the learning rate decays: cosine, linear, wsd, constant or your own"
    )
    schedule_settings: dict[str, Any] | None = key(
        None, "keys of a schedule of your own by name, as in {period: 100}"
    )
    schedule_steps: PositiveInt | None = key(
        None, "length of the schedule; null: the run's", "steps"
    )
    warmup_steps: NonNegativeInt = key(100, "linear warm-up of the learning rate from 0", "steps")
    decay_from: PositiveInt | None = key(
        None,
        "cosine, linear, wsd: step up to which lr stays at its peak after the warm-up; null: the "
        "end of the warm-up, or the step in which trainer.max_minutes becomes a number of steps",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.1, "final learning rate over the peak"
    )
    decay_ratio: UnitInterval = key(
        0.2, "wsd: the last fraction of the schedule, in which lr decays"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none", "of all learning rates, by batch over reference batch"
    )
    reference_batch_size: PositiveInt | None = key(
        None, "lr_scaling: the batch that lr is meant for", "sequences"
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine", "lr"] = key(
        "constant",
        "how weight_decay changes over the schedule; lr: in proportion to the learning rate",
    )
    final_weight_decay_ratio: Annotated[NonNegativeFloat, Field(le=1e6)] = key(
        0.0, "weight_decay_schedule=linear, cosine: final weight decay over the first"
    )

    def __post_init__(self) -> None:
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        self.own_schedule()
        check(
            self.decay_from is None or self.schedule in DECAYING,
            f"optimizer.decay_from={self.decay_from} has no effect with "
            f"optimizer.schedule={self.schedule}; leave it out, or set optimizer.schedule to "
            "cosine, linear or wsd",
        )
        check(
            self.lr_scaling == "none" or self.reference_batch_size is not None,
            f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.reference_batch_size",
        )

    def own_schedule(self) -> Any:
        """Return the keys of the schedule, as its class.

        Raises:
            ConfigError: names the key that is invalid.
        """
        settings = self.schedule_settings or {}
        return build(SCHEDULES[self.schedule], settings, "optimizer.schedule_settings")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW for all parameters."""

    usual_lr = (1e-5, 1e-2)

    betas: tuple[DecayFactor, DecayFactor] = key((0.9, 0.99), "decay per step of both moments")
    eps: PositiveFloat = key(1e-8, "added to the root of the second moment")


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum for all parameters."""

    usual_lr = (1e-4, 3.0)

    momentum: DecayFactor = key(0.9, "decay per step of the moving average")
    nesterov: bool = key(True, "Nesterov's momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.nesterov or self.momentum > 0,
            "optimizer.nesterov=true needs optimizer.momentum > 0",
        )


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of the hidden layers, AdamW for everything else (mingpt_ddp/optim)."""

    usual_lr = (2e-3, 0.3)
    needs_whole_matrices = True

    momentum: DecayFactor = key(0.95, "Muon's decay per step of the moving average")
    embedding_lr: LearningRate = key(0.1, "AdamW's peak for embeddings")
    head_lr: LearningRate = key(0.02, "AdamW's peak for a matrix in the model's `head`")
    vector_lr: LearningRate = key(0.1, "AdamW's peak for parameters that are not matrices")
    betas: tuple[DecayFactor, DecayFactor] = key(
        (0.9, 0.95), "AdamW's decay per step of both moments"
    )
    eps: PositiveFloat = key(1e-10, "AdamW's, added to the root of the second moment")


# The registered values of optimizer.name.
OPTIMIZERS: dict[str | None, type] = {"adamw": AdamWConfig, "muon": MuonConfig, "sgd": SGDConfig}
