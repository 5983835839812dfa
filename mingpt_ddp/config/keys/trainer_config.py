"""The keys of the group `trainer`: limits, batches, precision, evaluations and stability."""

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
    """The training loop. Limits that the command line sets replace all other limits."""

    max_epochs: PositiveInt | None = neutral(
        4, "Largest number of passes over the text.", "epochs", changes="end"
    )
    max_steps: PositiveInt | None = neutral(
        None, "Largest number of optimizer steps.", "steps", changes="end"
    )
    max_minutes: Annotated[PositiveFloat, Field(le=1e9)] | None = neutral(
        None,
        "Longest training time. After a tenth of this time, the speed so far fixes the number of "
        "steps.",
        "minutes",
        changes="end",
    )
    batch_size: PositiveInt = key(
        12, "Batch size of an optimizer step, over all ranks.", "sequences"
    )
    batch_size_per_rank: PositiveInt | None = key(
        None,
        "Batch size per rank, instead of trainer.batch_size. The first start fixes the "
        "total over all ranks.",
        "sequences",
    )
    micro_batch_size: PositiveInt | None = key(
        None,
        "Batch size of one forward pass of a rank. null uses the largest divisor of "
        "batch_size up to batch_size / ranks.",
        "sequences",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto uses the GPU if there is one.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "auto uses bf16 where it is fast, and fp32 elsewhere. On a CPU, it uses fp32 for a "
        "model of your own.",
    )
    compile: bool | Literal["auto", "cuda_graphs"] = key(
        "auto",
        "Use torch.compile. auto compiles on a GPU, with CUDA graphs (cuda_graphs) for small "
        "models on one GPU.",
        changes="rounding",
    )
    grad_norm_clip: PositiveFloat | None = key(
        1.0, "Largest norm of all gradients together. null does not clip."
    )
    grad_value_clip: PositiveFloat | None = key(
        None, "Largest absolute value of a gradient, after grad_norm_clip. null does not clip."
    )
    log_every: PositiveInt = neutral(10, "Interval between log lines.", "steps")
    eval_every: PositiveInt | None = neutral(
        250, "Interval between evaluations. The last step is always evaluated.", "steps"
    )
    eval_steps: PositiveInt | None = neutral(
        None,
        "Evaluate only as many windows as this number of training steps uses. null evaluates "
        "the whole split.",
        "steps",
        changes="measurement",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = neutral(
        None, "First and last step to profile. null profiles none.", "steps"
    )
    sample_every: PositiveInt | None = neutral(
        None, "Interval between generated samples in the log. null logs one, at the end.", "steps"
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "What to do if a loss or gradient is not finite or spikes. skip leaves the step out. "
        "rollback returns to the last snapshot and skips the batch.",
    )
    spike_factor: Annotated[float, Field(gt=1)] | None = key(
        None, "A loss above this multiple of its moving average is a spike. null ignores spikes."
    )
    deterministic: bool = key(
        False,
        "Compute the same bits every time on a GPU too. Training is then slower.",
        changes="rounding",
    )
    activation_checkpointing: bool = neutral(
        False,
        "Recompute activations in the backward pass. Saves memory, and takes a third more time.",
        changes="rounding",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = key(
        None,
        "Decay per step of a moving average of the weights. The average is evaluated, sampled and "
        "exported instead of the weights. null keeps no average.",
    )
    patience: PositiveInt | None = neutral(
        None, "Stop after this many evaluations without a lower loss.", "evaluations", changes="end"
    )
    min_delta: NonNegativeFloat = neutral(
        0.0,
        "For trainer.patience: a loss counts as lower if it falls by more than this.",
        "nats",
        changes="end",
    )

    def __post_init__(self) -> None:
        check(
            self.patience is None or self.eval_every is not None,
            f"trainer.patience={self.patience} needs evaluations during training; set "
            "trainer.eval_every",
        )
        check(
            any((self.max_epochs, self.max_steps, self.max_minutes)),
            "trainer.max_epochs, trainer.max_steps and trainer.max_minutes are all null; set one "
            "of them",
        )
        first, last = self.profile or (1, 1)
        check(
            0 <= last - first < 100,
            f"trainer.profile=[{first},{last}] must be the first and the last of at most 100 steps",
        )
        micro = self.micro_batch_size
        batch = self.batch_size_per_rank or self.batch_size
        check(
            micro is None or batch % micro == 0,
            f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro}",
        )
