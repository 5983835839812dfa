"""The power laws of a sweep over sizes, data or steps, and their lines in a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mingpt_ddp.results.formats import assignments, brief, cut
from mingpt_ddp.results.groups import Group, Recipe, recipe
from mingpt_ddp.results.objective import Objective
from mingpt_ddp.results.runs import Job, grouped, known, number, varying

if TYPE_CHECKING:
    from mingpt_ddp.results.stats.power_law import PowerLaw

# Keys of a model that change its number of parameters, and are no axis by themselves.
SIZE_KEYS = (
    "model.name",
    *("model.n_layer", "model.n_embd", "model.n_head"),
    *("model.channels", "model.n_hidden"),
)
MOST = 6  # laws of an axis


@dataclass(frozen=True)
class Axis:
    """What a sweep scales, and how it is read from a job."""

    name: str
    keys: tuple[str, ...]  # that change it
    value_in: Callable[[Job], float | None]


def _axis_of(key: str) -> Axis:
    return Axis(key, (key,), lambda job: number(job.config.get(key)))


# A poor fit is reported for these alone: few learning rates, say, follow a law.
AXES = (
    Axis("parameters", SIZE_KEYS, lambda job: number(job.result.get("parameters"))),
    _axis_of("data.truncate"),
    Axis("steps", ("trainer.max_steps", "trainer.max_minutes"), lambda job: number(job.step)),
)


@dataclass(frozen=True)
class Scaling:
    """The law of the jobs that differ in one axis and their seeds alone."""

    axis: Axis
    setting: str  # the values of what else is swept; "" if nothing is
    xs: list[float]
    ys: list[float]
    law: PowerLaw
    measured: Objective

    def points(self, count: int) -> list[float]:
        """Return so many values of x, equally far apart on a logarithmic axis."""
        low, high = min(self.xs), max(self.xs)
        return [low * (high / low) ** (index / (count - 1)) for index in range(count)]

    @property
    def sentence(self) -> str:
        """`loss = 1.2 + 34 * parameters^-0.31 (exponent 0.28 to 0.34, ...)`."""
        law = self.law
        offset = f"{brief(law.offset)} + " if law.offset else ""
        curve = f"{offset}{brief(law.factor)} * {cut(self.axis.name)}^-{law.exponent:.3f}"
        text = f"{self.measured.title} = {curve} (exponent {law.low:.3f} to {law.high:.3f}, "
        text += f"95% interval, {law.jobs} jobs)"
        if self.setting:
            text += f" for {self.setting}"
        if law.why_poor is not None:
            text += f"; a poor fit: {law.why_poor}"
        return text


def scalings(groups: list[Group]) -> list[Scaling]:
    """Return the laws of all axes, at most MOST of each. Every swept number is an axis.

    Only losses have laws.

    Args:
        groups: as `replicates` returns them.
    """
    if groups[0].ranked_by.note:
        return []
    swept = varying(groups)
    known_keys = {key for axis in AXES for key in axis.keys}
    laws: list[Scaling] = []
    for axis in [*AXES, *(_axis_of(key) for key in swept if key not in known_keys)]:
        keys = [key for key in swept if key not in axis.keys]
        series = grouped(groups, lambda group, axis=axis: _recipe_without(group, axis))  # type: ignore[misc]
        laws += known(_scaling(axis, members, keys) for members in series.values())[:MOST]
    return laws


def _scaling(axis: Axis, groups: list[Group], keys: list[str]) -> Scaling | None:
    """Return the law of groups that differ in an axis alone; None if they have none."""
    if len(groups) < 2 or not set(axis.keys) & set(varying(groups)):
        return None
    xs = []
    ys = []
    for job in [job for group in groups for job in group.jobs]:
        x = axis.value_in(job) or 0.0
        y = job.objective or 0.0
        if x > 0 and y > 0:
            xs.append(x)
            ys.append(y)
    # numpy takes a tenth of a second to import, for which most sweeps have no use
    from mingpt_ddp.results.stats.power_law import fit

    law = fit(xs, ys)
    if law is None or (axis not in AXES and law.why_poor):
        return None
    return Scaling(axis, _setting(groups[0], keys), xs, ys, law, groups[0].ranked_by)


def _recipe_without(group: Group, axis: Axis) -> Recipe:
    """Return what identifies the recipe of a group without the axis."""
    return recipe(group, sorted(key for key in group.config if key not in axis.keys))


def _setting(group: Group, keys: list[str]) -> str:
    return cut(", ".join(assignments(group, keys)))
