"""The power laws of a sweep over sizes, data or steps, and their lines in a report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mingpt_ddp.results.formats import brief, cut, short_names, shown
from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.objective import Objective
from mingpt_ddp.results.runs import Job, Value, identity, number, varying

if TYPE_CHECKING:
    from mingpt_ddp.results.stats.power_law import PowerLaw

# of a model: they change its number of parameters and are no axis of their own
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
    of: Callable[[Job], float | None]


# a poor fit is said for these, and shows nothing for other keys: few learning rates follow a law
AXES = (
    Axis("parameters", SIZE_KEYS, lambda job: number(job.result.get("parameters"))),
    Axis("data.truncate", ("data.truncate",), lambda job: number(job.config.get("data.truncate"))),
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


def power_law_lines(found: list[Scaling]) -> list[str]:
    """Return a line for each power law."""
    return [_line(scaling) for scaling in found]


def scalings(groups: list[Group]) -> list[Scaling]:
    """Return the laws of all axes, at most MOST of each; every swept number is one.

    Args:
        groups: as `replicates` returns them.
    """
    found: list[Scaling] = []
    swept = varying(groups)
    for axis in [*AXES, *_other_axes(swept)]:
        series: dict[Hashable, list[Group]] = {}
        for group in groups:
            series.setdefault(_rest(group, axis), []).append(group)
        of_axis = []
        keys = [key for key in swept if key not in axis.keys]
        for members in series.values():
            scaling = _scaling(axis, members, keys)
            if scaling is not None:
                of_axis.append(scaling)
        found += of_axis[:MOST]
    return found


def _other_axes(keys: list[str]) -> list[Axis]:
    """Return an axis for each key that changes none of AXES."""
    known = {key for axis in AXES for key in axis.keys}
    return [
        Axis(key, (key,), lambda job, key=key: number(job.config.get(key)))  # type: ignore[misc]
        for key in keys
        if key not in known
    ]


def _scaling(axis: Axis, groups: list[Group], keys: list[str]) -> Scaling | None:
    """Return the law of groups that differ in an axis alone; None if they have none."""
    if len(groups) < 2 or not set(axis.keys) & set(varying(groups)):
        return None
    xs = []
    ys = []
    for job in _jobs(groups):
        x = axis.of(job)
        if x is not None and x > 0 and job.objective is not None and job.objective > 0:
            xs.append(x)
            ys.append(job.objective)
    # numpy takes a tenth of a second to import, for which most sweeps have no use
    from mingpt_ddp.results.stats.power_law import fit

    law = fit(xs, ys)
    if law is None or (axis not in AXES and law.why_poor):
        return None
    return Scaling(axis, _setting(groups[0], keys), xs, ys, law, groups[0].ranked_by)


def _jobs(groups: Iterable[Group]) -> list[Job]:
    return [job for group in groups for job in group.jobs]


def _rest(group: Group, axis: Axis) -> Hashable:
    """Return what identifies the recipe of a group without the axis."""
    rest = sorted(key for key in group.config if key not in axis.keys)
    return tuple((key, identity(group.config[key])) for key in rest)


def _setting(group: Group, keys: list[str]) -> str:
    names = short_names(keys)
    known: dict[str, Value] = {names[key]: group.config[key] for key in keys if key in group.config}
    return cut(", ".join(f"{name}={shown(value)}" for name, value in known.items()))


def _line(scaling: Scaling) -> str:
    """Return `loss = 1.2 + 34 * parameters^-0.31 (exponent 0.28 to 0.34, ...)`."""
    law = scaling.law
    offset = f"{brief(law.offset)} + " if law.offset else ""
    name = scaling.measured.title
    text = f"{name} = {offset}{brief(law.factor)} * {cut(scaling.axis.name)}^-{law.exponent:.3f}"
    text += f" (exponent {law.low:.3f} to {law.high:.3f}, 95% interval, {law.jobs} jobs)"
    if scaling.setting:
        text += f" for {scaling.setting}"
    if law.why_poor is not None:
        text += f"; a poor fit: {law.why_poor}"
    return text
