"""Building blocks of the schema: types with bounds, and the metadata of a key."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
DecayFactor = Annotated[float, Field(ge=0, lt=1)]  # of a moving average, per step
LearningRate = Annotated[PositiveFloat, Field(ge=1e-30, le=1e30)]  # fp32 holds its products


# What a key changes: a run's results, their last bits, or none of them.
Effect: TypeAlias = Literal["training", "rounding", "end", "measurement", "nothing"]


def key(
    default: Any,
    description: str,
    unit: str = "",
    *,
    in_name: bool = True,
    changes: Effect = "training",
) -> Any:
    """Describe a key, as in `log_every: PositiveInt = key(10, "between two log lines", "steps")`.

    Args:
        default: ... if the key is required.
        in_name: whether it enters the name of an unnamed run.
        changes: "training": what a step computes; "rounding": the last bits of that alone; "end":
            the step at which the run ends; "measurement": what its evaluations measure; "nothing".
    """
    extra = {"unit": unit, "in_name": in_name, "changes": changes}
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default,
        metadata={"description": description, "json_schema_extra": extra},
    )


neutral = partial(key, in_name=False, changes="nothing")


def enters_name(field: dataclasses.Field[Any]) -> bool:
    """Return whether a key enters the name of an unnamed run; keys that users register do."""
    return bool(field.metadata.get("json_schema_extra", {"in_name": True})["in_name"])


def describe(metadata: Mapping[str, Any]) -> str:
    """Return a key's unit and the first clause of its description."""
    unit = metadata["json_schema_extra"]["unit"]
    meaning = metadata["description"].partition(";")[0]
    return f"{unit}: {meaning}" if unit else meaning
