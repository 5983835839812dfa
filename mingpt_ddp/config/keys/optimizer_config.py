"""The keys of the optimizers and of their schedules. Users can extend them with a Python file."""

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
    """Base for the keys of your own schedule, set by optimizer.schedule_settings."""


# The registered values of optimizer.schedule.
SCHEDULES: dict[str | None, type] = dict.fromkeys(
    ("cosine", "linear", "wsd", "constant"), ScheduleConfig
)

# The schedules that use optimizer.decay_from: their learning rate decays after this step.
DECAYING = ("cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(UserCodeConfig):
    """The keys of every optimizer: learning rate, weight decay and schedule (mingpt_ddp/optim)."""

    # A learning rate outside these bounds is probably a mistake.
    usual_lr: ClassVar[tuple[float, float]] = (0.0, math.inf)
    # True if a step needs whole matrices, which strategies must not split.
    needs_whole_matrices: ClassVar[bool] = False

    name: str = key(
        ..., "Optimizer to build: adamw, muon, sgd, or the name that your code registers."
    )
    lr: LearningRate = key(
        1e-3, "Peak learning rate of the schedule. For muon: the rate of the matrices."
    )
    weight_decay: Annotated[NonNegativeFloat, Field(le=1e6)] = key(
        0.1, "Weight decay of matrices. Vectors are not decayed."
    )
    schedule: str = key(
        "cosine",
        "How the learning rate decays: cosine, linear, wsd, constant, or the name that your "
        "code registers.",
    )
    schedule_settings: dict[str, Any] | None = key(
        None, "Settings of your registered schedule by key, as in {period: 100}."
    )
    schedule_steps: PositiveInt | None = key(
        None, "Length of the schedule. null uses the length of the run.", "steps"
    )
    warmup_steps: NonNegativeInt = key(
        100, "Length of the warm-up, in which the learning rate rises linearly from 0.", "steps"
    )
    decay_from: PositiveInt | None = key(
        None,
        "For cosine, linear and wsd: last step at the peak learning rate. null uses the last step "
        "of the warm-up or, with trainer.max_minutes, the step at which the number of steps is "
        "fixed.",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.1, "Final learning rate, as a fraction of the peak."
    )
    decay_ratio: UnitInterval = key(
        0.2, "For wsd: fraction of the schedule, at its end, in which the learning rate decays."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none",
        "How all learning rates scale with the batch size divided by "
        "optimizer.reference_batch_size.",
    )
    reference_batch_size: PositiveInt | None = key(
        None, "For lr_scaling: batch size for which optimizer.lr is meant.", "sequences"
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine", "lr"] = key(
        "constant",
        "How the weight decay changes over the schedule. lr keeps it proportional to the "
        "learning rate.",
    )
    final_weight_decay_ratio: Annotated[NonNegativeFloat, Field(le=1e6)] = key(
        0.0,
        "For weight_decay_schedule=linear or cosine: final weight decay, as a fraction of the"
        " first.",
    )

    def __post_init__(self) -> None:
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        self.schedule_config()
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

    def schedule_config(self) -> Any:
        """Build the configuration of the schedule from optimizer.schedule_settings.

        Raises:
            ConfigError: A setting is invalid. The message names it.
        """
        settings = self.schedule_settings or {}
        return build(SCHEDULES[self.schedule], settings, "optimizer.schedule_settings")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW for all parameters."""

    usual_lr = (1e-5, 1e-2)

    betas: tuple[DecayFactor, DecayFactor] = key(
        (0.9, 0.99), "Decay per step of the first and the second moment."
    )
    eps: PositiveFloat = key(1e-8, "Added to the square root of the second moment.")


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum for all parameters."""

    usual_lr = (1e-4, 3.0)

    momentum: DecayFactor = key(0.9, "Decay per step of the moving average of gradients.")
    nesterov: bool = key(True, "Use Nesterov's momentum.")

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

    momentum: DecayFactor = key(0.95, "Decay per step of Muon's moving average of gradients.")
    embedding_lr: LearningRate = key(0.1, "AdamW's peak learning rate for embeddings.")
    head_lr: LearningRate = key(
        0.02, "AdamW's peak learning rate for a matrix in the model's `head`."
    )
    vector_lr: LearningRate = key(
        0.1, "AdamW's peak learning rate for parameters that are not matrices."
    )
    betas: tuple[DecayFactor, DecayFactor] = key(
        (0.9, 0.95), "AdamW's decay per step of the first and the second moment."
    )
    eps: PositiveFloat = key(1e-10, "Added to the square root of AdamW's second moment.")


# The registered values of optimizer.name.
OPTIMIZERS: dict[str | None, type] = {"adamw": AdamWConfig, "muon": MuonConfig, "sgd": SGDConfig}
