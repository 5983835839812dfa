"""Building blocks of the schema: types with bounds, and functions that describe a key."""

import dataclasses
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
DecayFactor = Annotated[float, Field(ge=0, lt=1)]  # decay of a moving average per step
# The bounds keep products of a learning rate within the range of fp32.
LearningRate = Annotated[PositiveFloat, Field(ge=1e-30, le=1e30)]


# How a key changes the results of a run. The docstring of `key` explains the values.
Effect: TypeAlias = Literal["training", "rounding", "end", "measurement", "nothing"]


def key(
    default: Any,
    description: str,
    unit: str = "",
    *,
    in_name: bool = True,
    changes: Effect = "training",
) -> Any:
    """Describe a key, as in `log_every: PositiveInt = key(10, "Interval of log lines.", "steps")`.

    Args:
        default: Default value, or ... if the key is required.
        description: Sentences for docs/configuration.md and --help.
        unit: Unit of the value, such as steps. "" if it has none.
        in_name: True if the value is part of the hash in the name that a run gets if run.name is
            null.
        changes: Effect of the key on results. "training" changes the computation of a step,
            "rounding" only the last bits of its result. "end" changes the step at which the run
            ends, "measurement" the numbers that evaluations measure. "nothing" changes no result.
    """
    extra = {"unit": unit, "in_name": in_name, "changes": changes}
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default,
        metadata={"description": description, "json_schema_extra": extra},
    )


# Describe a key that is not part of a run's name. Unless `changes` says otherwise, the key does not
# change any result.
neutral = partial(key, in_name=False, changes="nothing")


def enters_name(field: dataclasses.Field[Any]) -> bool:
    """Return True if a key is part of the name that a run gets if run.name is null.

    This is also the case for all keys that users register.
    """
    return bool(field.metadata.get("json_schema_extra", {"in_name": True})["in_name"])
