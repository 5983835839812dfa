"""The keys of the training loop."""

# ruff: noqa: RUF009  key() returns a dataclass field
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mingpt_ddp.config.keys.fields import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    key,
    neutral,
)
from mingpt_ddp.config.validation import check


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The training loop: limits, batch sizes, precision, reports (mingpt_ddp/training)."""

    max_epochs: PositiveInt | None = neutral(
        4, "limit of passes over the text; if typed alone, the only limit", "epochs", changes="end"
    )
    max_steps: PositiveInt | None = neutral(
        None, "limit of optimizer steps; if typed alone, the only limit", "steps", changes="end"
    )
    max_minutes: Annotated[PositiveFloat, Field(le=1e9)] | None = neutral(
        None,
        "limit of training time, which becomes a number of steps after a tenth of it; if typed "
        "alone, the only limit",
        "minutes",
        changes="end",
    )
    batch_size: PositiveInt = key(12, "per optimizer step over all ranks", "sequences")
    batch_size_per_rank: PositiveInt | None = key(
        None, "instead of batch_size, at the first start", "sequences"
    )
    micro_batch_size: PositiveInt | None = key(
        None,
        "per rank per forward; null: the largest divisor of batch_size up to batch_size / ranks",
        "sequences",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: the GPU if there is one")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "auto: bf16 where it is fast, but for a model of your own on a CPU; else fp32"
    )
    compile: bool | Literal["auto", "cuda_graphs"] = key(
        "auto",
        "torch.compile; auto: on a GPU, with CUDA graphs (cuda_graphs) for small models on one GPU",
        changes="rounding",
    )
    grad_norm_clip: PositiveFloat | None = key(
        1.0, "largest global gradient norm; null: no clipping"
    )
    grad_value_clip: PositiveFloat | None = key(
        None, "largest absolute value of a gradient, after grad_norm_clip; null: no clipping"
    )
    log_every: PositiveInt = neutral(10, "between two log lines", "steps")
    eval_every: PositiveInt | None = neutral(
        250, "between evaluations; there is always a final one", "steps"
    )
    eval_steps: PositiveInt | None = neutral(
        None,
        "evaluate this many steps' windows; null: the whole split",
        "steps",
        changes="measurement",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = neutral(
        None, "the first and the last to profile; null: none", "steps"
    )
    sample_every: PositiveInt | None = neutral(
        None, "between two samples in the log; null: only one, at the end", "steps"
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "after a non-finite or spiking loss or gradient; rollback: to the last snapshot, "
        "then skip the batch",
    )
    spike_factor: Annotated[float, Field(gt=1)] | None = key(
        None, "a spike is a loss above this times its average"
    )
    deterministic: bool = key(
        False, "bit-identical results on a GPU too, slower there", changes="rounding"
    )
    activation_checkpointing: bool = neutral(
        False, "recompute activations: less memory, a third more time", changes="rounding"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = key(
        None,
        "decay per step of an average of the weights, which is evaluated, sampled and "
        "exported; null: none",
    )
    patience: PositiveInt | None = neutral(
        None, "stop after this many without a lower loss", "evaluations", changes="end"
    )
    min_delta: NonNegativeFloat = neutral(
        0.0, "patience: a loss is lower if it is so by more than this", "nats", changes="end"
    )

    def __post_init__(self) -> None:
        check(
            self.patience is None or self.eval_every is not None,
            f"trainer.patience={self.patience} needs evaluations during training; set "
            "trainer.eval_every",
        )
        check(
            any((self.max_epochs, self.max_steps, self.max_minutes)),
            "trainer.max_epochs, trainer.max_steps and trainer.max_minutes are null; set one of "
            "them",
        )
        first, last = self.profile or (1, 1)
        check(
            0 <= last - first < 100,
            f"trainer.profile=[{first},{last}] must be a first and a last step, at most 100 in all",
        )
        micro = self.micro_batch_size
        batch = self.batch_size_per_rank or self.batch_size
        check(
            micro is None or batch % micro == 0,
            f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro}",
        )
