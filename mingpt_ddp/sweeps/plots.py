"""The drawings of a report: loss curves, the objective against a parameter, parallel coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mingpt_ddp.sweeps.runs import Job
from mingpt_ddp.sweeps.scales import CHARACTER, LONGEST_LABEL, Scale, linear, of_losses, of_values
from mingpt_ddp.sweeps.svg import ROOM, Markup, frame, joined, line, path, picture, tag, text
from mingpt_ddp.sweeps.values import cut, cut_inside, identity, is_number, order, shown

POINTS = 200  # of a curve, at most
FEW = 6  # jobs that have a colour each
SHADES = 20  # of the colours that stand for the objective
FAR = 1e4  # pixels: further up a curve is not drawn
LACKS = 24  # pixels below an axis: where jobs pass that do not have the parameter
LOSS = "nats per character"


@dataclass(frozen=True)
class Mark:
    """A job as it is drawn."""

    job: Job
    number: int  # its rank, from 1
    colour: str  # a class of the style sheet
    best: bool

    def classes(self, *names: str) -> str:
        words = [*names, self.colour, "best" if self.best else "", "" if self.job.objective is not None else "open"]
        return " ".join(filter(None, words))


def marks_of(jobs: list[Job]) -> list[Mark]:
    """A few jobs have a colour each; many are coloured by their objective."""
    low, high, _ = shaded(jobs)
    marks = []
    for number, job in enumerate(jobs, start=1):
        if len(jobs) <= FEW:
            colour = f"k{number - 1}"
        elif job.objective is None:
            colour = "none"
        else:
            share = min(1.0, (job.objective - low) / (high - low)) if high > low else 0.0
            colour = f"c{round(share * (SHADES - 1))}"
        marks.append(Mark(job, number, colour, best=number == 1 and job.objective is not None))
    return marks


def shaded(jobs: list[Job]) -> tuple[float, float, bool]:
    """The lowest objective, the highest that is not far off, and whether one is."""
    losses = [job.objective for job in jobs if job.objective is not None]
    held = [loss for loss in losses if of_losses(losses, 1.0, 0.0).holds(loss)]
    return min(losses, default=0.0), max(held, default=0.0), len(held) < len(losses)


# Curves.


def curves(marks: list[Mark], key: str, title: str) -> Markup | None:
    """A loss over the steps of every job that has measured it; None where none has."""
    series = {mark.number: thinned(mark.job.history.series(key)) for mark in marks}
    drawn = [mark for mark in reversed(marks) if series[mark.number]]  # the best is drawn last, above the others
    if not drawn:
        return None
    width, height = 540, 330
    steps = [float(step) for points in series.values() for step, _ in points]
    x = linear(0.0, max(*steps, 1.0), ROOM, width - 16)
    y = of_losses([loss for points in series.values() for _, loss in points], height - 44, 34)
    parts = [_curve(mark, series[mark.number], x, y) for mark in drawn]
    clip = tag("clipPath", tag("rect", x=x.start, y=y.end, width=x.end - x.start + 8, height=y.start - y.end), id=key)
    body = tag("g", *parts, clip_path=f"url(#{key})")
    return picture(width, height, title, clip, frame(x, y, "step", f"{title} ({LOSS})"), body, class_="curves")


def _curve(mark: Mark, points: list[tuple[float, float]], x: Scale, y: Scale) -> Markup:
    places = [(x.at(step), min(max(y.place(loss), -FAR), FAR)) for step, loss in points]
    end = tag("circle", cx=places[-1][0], cy=places[-1][1], r=2.5, class_="dot")
    return tag("g", path(places, class_="line"), end, class_=mark.classes("job"), data_job=mark.number)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS of them: means of neighbours, and the last one as it is."""
    if len(points) <= POINTS:
        return list(points)
    every = -(-(len(points) - 1) // (POINTS - 1))
    bins = [points[begin : min(begin + every, len(points) - 1)] for begin in range(0, len(points) - 1, every)]
    means = [(sum(step for step, _ in b) / len(b), sum(loss for _, loss in b) / len(b)) for b in bins]
    return [*means, points[-1]]


# The objective against a parameter.


def against(marks: list[Mark], key: str, name: str) -> Markup | None:
    """The objective of every job over one parameter; None where there is nothing to draw."""
    drawn = [mark for mark in reversed(marks) if key in mark.job.config and mark.job.val_loss is not None]
    if not drawn:
        return None
    width, height = 350, 250
    x = of_values((mark.job.config[key] for mark in drawn), ROOM, width - 14)
    y = _objective_scale(drawn, height - 44, 34)
    parts = [
        frame(x, y, cut(name, 40), f"validation loss ({LOSS})"),
        _best_way(drawn, key, x, y),
        *(_dot(mark, x.at(mark.job.config[key]), y) for mark in drawn),
    ]
    return picture(width, height, f"validation loss against {key}", *parts, class_="against")


def _objective_scale(marks: list[Mark], start: float, end: float) -> Scale:
    """By the final losses; those of jobs that are not complete may lie beyond its end."""
    losses = [mark.job.objective for mark in marks if mark.job.objective is not None]
    return of_losses(losses or [mark.job.val_loss for mark in marks if mark.job.val_loss is not None], start, end)


def _dot(mark: Mark, x: float, y: Scale) -> Markup:
    """A circle, or a triangle that points to where the loss lies beyond the end of the axis."""
    loss = mark.job.val_loss
    attributes = {"class_": mark.classes("job", "dot"), "data_job": mark.number}
    if loss is None or y.holds(loss):
        return tag("circle", cx=x, cy=y.at(loss), r=5.5 if mark.best else 4.0, **attributes)
    at, up = y.at(loss), -1 if y.place(loss) < y.at(loss) else 1
    corners = [(x, at), (x + 5, at - 8.0 * up), (x - 5, at - 8.0 * up)]
    return path([*corners, corners[0]], **attributes)


def _best_way(marks: list[Mark], key: str, x: Scale, y: Scale) -> Markup:
    """The best objective at each value, joined."""
    best: dict[str, Mark] = {}
    for mark in marks:  # the best one comes last
        if mark.job.objective is not None and y.holds(mark.job.objective):
            best[identity(mark.job.config[key])] = mark
    several = 2 <= len(best) < len(marks) and len(best) <= 8
    if not several or not all(is_number(mark.job.config[key]) for mark in best.values()):
        return Markup("")
    ordered = sorted(best.values(), key=lambda mark: order(mark.job.config[key]))
    return path([(x.at(mark.job.config[key]), y.at(mark.job.objective)) for mark in ordered], class_="way")


# Parallel coordinates.


def parallel(marks: list[Mark], keys: list[str], names: dict[str, str]) -> Markup | None:
    """A line for each job through its parameters to its objective; None without parameters."""
    drawn = [mark for mark in reversed(marks) if any(key in mark.job.config for key in keys)]
    if not keys or not drawn:
        return None
    gap = max(130, min(460, 950 // len(keys)))
    labels = [cut_inside(shown(mark.job.config.get(keys[0])), LONGEST_LABEL) for mark in drawn]
    left = max(45.0, 14 + CHARACTER * max(map(len, labels)), 3.8 * len(cut(names[keys[0]], gap // 8)))
    xs = [left + gap * place for place in range(len(keys) + 1)]
    width, height, top = round(xs[-1]) + 66, 330, 46.0
    lacking = [any(key not in mark.job.config for mark in drawn) for key in keys]
    bottom = height - (56.0 if any(lacking) else 32.0)
    scales = [
        of_values([mark.job.config[key] for mark in drawn if key in mark.job.config], bottom, top, upright=True)
        for key in keys
    ]
    loss = _objective_scale(drawn, bottom, top)
    lines = [_way_through(mark, keys, [*scales, loss], xs) for mark in drawn]
    axes = [
        _axis(x, scale, cut(names[key], gap // 8), lacks)
        for x, scale, key, lacks in zip(xs, scales, keys, lacking, strict=False)
    ]
    return picture(width, height, "parallel coordinates", *lines, *axes, _last_axis(xs[-1], loss), class_="parallel")


def _way_through(mark: Mark, keys: list[str], scales: list[Scale], xs: list[float]) -> Markup:
    """Below the axes of parameters that the job does not have, and to the last axis if it has a loss."""
    config, loss = mark.job.config, mark.job.val_loss
    ys = [
        scale.at(config[key]) if key in config else scale.start + LACKS
        for key, scale in zip(keys, scales, strict=False)
    ]
    if loss is not None:
        ys.append(scales[-1].at(loss))
    return path(zip(xs, ys, strict=False), class_=mark.classes("job", "line"), data_job=mark.number)


def _axis(x: float, scale: Scale, name: str, lacks: bool) -> Markup:
    parts = [line(x, scale.start, x, scale.end, "axis"), text(x, 28, name, class_="title")]
    if lacks:
        parts.append(text(x, scale.start + LACKS + 16, "none", class_="tick halo"))
    for tick in scale.ticks:
        parts += [line(x - 4, tick.at, x, tick.at, "axis"), text(x - 8, tick.at + 4, tick.label, "end", "tick halo")]
    return joined(parts)


def _last_axis(x: float, scale: Scale) -> Markup:
    titles = [text(x, 14, "validation loss", class_="title"), text(x, 29, LOSS)]
    parts = [line(x, scale.start, x, scale.end, "axis")]
    for tick in scale.ticks:
        parts += [line(x, tick.at, x + 4, tick.at, "axis"), text(x + 8, tick.at + 4, tick.label, "start")]
    return joined([*titles, *parts])
