"""The keys of the command `sample`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from mingpt_ddp.cli.arguments import FREE_TEXT
from mingpt_ddp.config.keys.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)


@dataclass(frozen=True)
class SampleConfig:
    """The keys of the command `sample`. The usage in commands/sample.py describes them."""

    snapshot: str
    prompt: str = field(default="", metadata=FREE_TEXT)
    max_new_tokens: PositiveInt = 500
    temperature: NonNegativeFloat = 0.8
    top_k: PositiveInt | None = None
    top_p: UnitInterval | None = None
    seed: NonNegativeInt = 1
    samples: Annotated[PositiveInt, Field(le=10_000)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    code: str | None = None
    step: int | Literal["newest", "best"] = "newest"
