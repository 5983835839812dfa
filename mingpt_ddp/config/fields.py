"""Building blocks of the schema: types with bounds, and the metadata of a key."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(gt=0, le=1)]
DecayFactor = Annotated[float, Field(ge=0, lt=1)]  # of a moving average, per step
LearningRate = Annotated[PositiveFloat, Field(ge=1e-30, le=1e30)]  # fp32 holds its products


def key(default: Any, description: str, unit: str = "", *, numerics: bool = True) -> Any:
    """Describe a key, as in `log_every: PositiveInt = key(10, "between two log lines", "steps")`.

    Args:
        default: ... if the key is required.
        numerics: whether it changes the numbers of a run, and therefore the name of an unnamed run.
    """
    extra = {"unit": unit, "numerics": numerics}
    return dataclasses.field(
        default=dataclasses.MISSING if default is ... else default,
        metadata={"description": description, "json_schema_extra": extra},
    )


neutral = partial(key, numerics=False)


def changes_numbers(field: dataclasses.Field[Any]) -> bool:
    """Return whether a key changes the numbers of a run; keys that users register do."""
    return bool(field.metadata.get("json_schema_extra", {"numerics": True})["numerics"])


def describe(metadata: Mapping[str, Any]) -> str:
    """Return a key's unit and the first clause of its description."""
    unit = metadata["json_schema_extra"]["unit"]
    meaning = metadata["description"].partition(";")[0]
    return f"{unit}: {meaning}" if unit else meaning
