"""The checks of a study before anything is written: its settings, and what was recorded."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from mingpt_ddp.config.validation import check

ANOTHER = "choose another run.name"


@with_config(ConfigDict(strict=True, allow_inf_nan=False))
@dataclass(frozen=True, kw_only=True)
class Header:
    """What all trials of a study share."""

    format: Literal[1] = 1
    sampler: str | None  # null: a grid
    space: dict[str, Any]  # Optuna's JSON of the distribution of each key
    metric: str
    seed: Annotated[int, Field(ge=0)]
    fixed: dict[str, Any]


HEADERS: TypeAdapter[Header] = TypeAdapter(Header)


def check_same_study(old: Header, new: Header) -> None:
    """Check that a command continues the recorded study.

    Raises:
        ConfigError: names what differs.
    """
    kinds = {True: "a grid", False: "a search"}
    was_grid, is_grid = old.sampler is None, new.sampler is None
    check(
        was_grid == is_grid,
        f"this directory holds {kinds[was_grid]} and the command is {kinds[is_grid]}; {ANOTHER}",
    )
    for key in [*old.space, *new.space]:
        check(key in new.space, f"{key} was searched in this directory, and is not now; {ANOTHER}")
        check(key in old.space, f"{key} was not searched in this directory before; {ANOTHER}")
        check(
            old.space[key] == new.space[key],
            f"{key} was searched in another range in this directory, {_short(old.space[key])}; "
            f"{ANOTHER}",
        )
    check(
        old.metric == new.metric,
        f"sweep.metric={new.metric} was {old.metric} in this directory; {ANOTHER}",
    )
    check(
        is_grid or old.seed == new.seed,
        f"sweep.seed={new.seed} was {old.seed} in this directory; {ANOTHER}",
    )
    for key in [*old.fixed, *new.fixed]:
        before, after = (
            json.dumps(each[key]) if key in each else "not set" for each in (old.fixed, new.fixed)
        )
        check(before == after, f"{key}={after} was {before} in this directory; {ANOTHER}")


def _short(distribution: Any) -> str:
    attributes = distribution.get("attributes") if isinstance(distribution, dict) else None
    return json.dumps(attributes or distribution)[:200]
