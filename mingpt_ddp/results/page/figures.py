"""How a page draws: the factory of its figures, the mark of each row, and all colours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median, quantiles
from typing import Any

from plotly.colors import sample_colorscale

from mingpt_ddp.errors import printable
from mingpt_ddp.results.formats import brief, cut, is_logarithmic, shown
from mingpt_ddp.results.groups import Group, best_group
from mingpt_ddp.results.runs import Value, by_value, identity, known, number
from mingpt_ddp.results.stats.intervals import Estimate, estimate

DRAWN = 12  # parameters with a plot; the table has all
POINTS = 200  # of a curve
OBJECTIVE = ""  # its key: or that of the last values, of a row that is not complete
LONGEST = 40  # characters of a name or value in a plot
# all are legible on white and on black
BEST_TO_WORST = ["rgb(24,119,214)", "rgb(176,80,159)", "rgb(226,134,24)"]
INCOMPLETE = "rgb(138,147,158)"
SERIES = [  # of what has no order: ranks, power laws
    "rgb(24,119,214)",
    "rgb(226,134,24)",
    "rgb(176,80,159)",
    "rgb(46,150,90)",
    "rgb(214,80,70)",
    "rgb(120,110,200)",
    "rgb(20,150,160)",
    INCOMPLETE,
]
# an axis; more ticks would have labels that overlap
LOG = {"type": "log", "nticks": 3, "exponentformat": "e"}
DECADES = range(-320, 100)
TICKS_APART = 0.17  # least share of an axis between two labels
Curve = dict[int, Estimate]  # by step
NONE = Estimate()


@dataclass(frozen=True, eq=False)
class Mark:
    """How a row, or a series of a run, is drawn in every figure."""

    colour: str
    text: str = ""  # on hover, as plotly's HTML
    name: str = ""  # the rank of the row in the table
    values: dict[str, Any] = field(default_factory=dict)  # of the row, by key or OBJECTIVE
    spread: Estimate = NONE  # whose interval is drawn around the value
    symbol: str = "circle"
    dash: str = "solid"
    is_best: bool = False

    def line(self, x: Iterable[float], y: Iterable[float], **more: Any) -> dict[str, Any]:
        """Return a trace through these points; a single one is drawn as a point."""
        xs = [*x]
        ys = [*map(rounded, y)]
        if len(xs) == 1:
            return points([self], xs, ys, **more)
        line = {"color": self.colour, "width": 3.5 if self.is_best else 1.6, "dash": self.dash}
        labels = {"line": line, "text": self.text, "name": self.name}
        return {"mode": "lines", "x": xs, "y": ys, **labels, **more}

    def band(self, x: Sequence[float], curve: Sequence[Estimate]) -> dict[str, Any]:
        """Return a trace that fills the intervals of a curve."""
        ends = known([*(each.high for each in curve), *(each.low for each in reversed(curve))])
        return {
            "mode": "none",
            "x": [*x, *reversed(x)],
            "y": [*map(rounded, ends)],
            "fill": "toself",
            "fillcolor": self.colour.replace("rgb(", "rgba(").replace(")", ",0.16)"),
            "hoverinfo": "skip",
            "name": self.name,
        }


def points(
    marks: Sequence[Mark], x: Iterable[float], y: Iterable[float], **more: Any
) -> dict[str, Any]:
    """Return a trace with a point for each mark."""
    colours = [mark.colour for mark in marks]
    marker = {
        "symbol": [mark.symbol for mark in marks],
        "size": [13 if mark.is_best else 9 for mark in marks],
        "color": colours,
        "line": {"color": colours, "width": 1.5},
    }
    more |= {"text": [mark.text for mark in marks], "ids": [mark.name for mark in marks]}
    return {"mode": "markers", "x": [*x], "y": [*y], "marker": marker, **more}


def marks_of(groups: list[Group], names: Mapping[str, str]) -> list[Mark]:
    """Return the mark of each row. Its colour shows the objective between the best and the worst.

    An outlier is a triangle with the colour of the worst other row.

    Args:
        names: Names of the parameters, by key.
    """
    objective = groups[0].ranked_by
    objectives = known(group.objective for group in groups)
    values = objectives or known(group.value for group in groups)
    high = highest([*map(objective.cost, values)])
    low = min(map(objective.cost, values), default=high)
    outlier = "triangle-down" if objective.maximize else "triangle-up"
    marks = []
    best = best_group(groups)
    for rank, group in enumerate(groups, start=1):
        cost = low if group.value is None else objective.cost(group.value)
        symbol = "circle" if cost <= high else outlier
        cost = min(cost, high)
        is_complete = group.objective is not None
        colour = INCOMPLETE
        if is_complete:
            share = (cost - low) / (high - low or 1.0)
            colour = str(sample_colorscale(BEST_TO_WORST, [share])[0])
        mark = Mark(
            colour,
            _hover(rank, group, names),
            str(rank),
            group.config | ({} if group.value is None else {OBJECTIVE: objective.cost(cost)}),
            spread=group.latest if symbol == "circle" else NONE,
            symbol=symbol if is_complete else f"{symbol}-open",
            dash="solid" if is_complete else "dash",
            is_best=len(groups) > 1 and group is best,
        )
        marks.append(mark)
    return marks


def _hover(rank: int, group: Group, names: Mapping[str, str]) -> str:
    """Return what a point of a row shows: rank, status, objective, parameters."""
    value = "" if group.value is None else f", {label(group.ranked_by.title)} {brief(group.value)}"
    if group.latest.half_width is not None:
        value += f" ± {brief(group.latest.half_width)}"
    seeds = [f"{group.seeds} seeds"] * (group.seeds > 1)
    lines = [f"<b>#{rank}</b> {label(group.status)}{value}", *seeds]
    return "<br>".join(lines + parameters(group, names)[:DRAWN])


def parameters(group: Group, names: Mapping[str, str]) -> list[str]:
    """Return `name: value` of each parameter, escaped."""
    lines = []
    for key, name in names.items():
        if key in group.config:
            lines.append(f"{label(name)}: {label(shown(group.config[key]))}")
    return lines


def highest(losses: list[float]) -> float:
    """Return the highest loss within three interquartile ranges above the third quartile."""
    if len(losses) < 4:
        return max(losses, default=0.0)
    first, _, third = quantiles(losses, n=4, method="inclusive")
    return max(loss for loss in losses if loss <= third + 3 * (third - first))


def loss_axis(losses: list[float], title: str = "", starts: Sequence[float] = ()) -> dict[str, Any]:
    """Return an axis that shows all losses but outliers, and where most curves start."""
    low = min(losses, default=0.0)
    high = highest(losses)
    if starts:
        high = max(high, median(starts))
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return axis(title, range=[low - margin, high + margin])


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis of plotly's; its title is plotly's HTML."""
    return {"title": {"text": title}, **more}


def label(text: str, longest: int = LONGEST) -> str:
    """Escape a text for plotly, which renders tags and entities in labels."""
    return escape(printable(cut(text, longest)), quote=False)


def rounded(value: float) -> float:
    """Return a value with the digits that a figure can show: the page is a third as large."""
    return float(f"{value:.6g}")


def mean_curve(curves: Iterable[Iterable[tuple[int, float]]]) -> Curve:
    """Return the mean of curves at the steps that all have, at about POINTS of them."""
    drawn = [{x: y for x, y in curve if None not in (number(x), number(y))} for curve in curves]
    drawn = [curve for curve in drawn if curve]
    steps = sorted(set.intersection(*map(set, drawn))) if drawn else []
    kept = dict.fromkeys([*steps[:: len(steps) // POINTS + 1], *steps[-1:]])
    return {step: estimate([curve[step] for curve in drawn]) for step in kept}


class Scale:
    """The axis of a parameter.

    It is logarithmic if the values are numbers that span a factor of ten, and linear for other
    numbers. All other values are equidistant.
    """

    def __init__(self, values: Iterable[Value]) -> None:
        distinct = sorted(
            {identity(value): value for value in values}.values(),
            key=lambda value: (*by_value(number(value)), shown(value)),
        )
        places = known(map(number, distinct))
        self._is_numeric = len(places) == len(distinct)
        if not self._is_numeric:
            places = [*map(float, range(len(distinct)))]
        self._low, self._high = (places[0], places[-1]) if places else (0.0, 0.0)
        self._is_log = self._is_numeric and is_logarithmic(self._low, self._high)
        self._at = dict(zip(map(identity, distinct), places, strict=True))
        labels = {at: label(shown(value), 14) for at, value in zip(places, distinct, strict=True)}
        self._is_continuous = self._is_numeric and len(labels) * TICKS_APART > 1
        if self._is_continuous:
            ticks = self._round_logarithmic() if self._is_log else self._round_linear()
            labels = {at: brief(at) for at in ticks if self._low <= at <= self._high}
        self.labels: dict[float, str] = {}  # by coordinate, without those that would overlap
        for at, text in labels.items():
            if all(abs(self.share(at) - self.share(other)) > TICKS_APART for other in self.labels):
                self.labels[at] = text

    def at(self, value: Value) -> float:
        """Return the coordinate of a value on plotly's axis."""
        return self._at[identity(value)]

    def share(self, at: float) -> float:
        """Return the place of a coordinate between the ends of the axis, from 0 to 1."""
        low, high = self._low, self._high
        if self._is_log:
            low, at, high = map(math.log10, (low, at, high))
        return (at - low) / (high - low) if high > low else 0.5

    def axis(self, title: str) -> dict[str, Any]:
        """Return plotly's axis, with its own ticks for many numbers on a linear one."""
        if self._is_continuous and not self._is_log:
            return axis(title)
        kind = {"type": "log"} if self._is_log else {}
        return axis(title, tickvals=[*self.labels], ticktext=[*self.labels.values()], **kind)

    def _round_logarithmic(self) -> list[float]:
        return [float(f"{digit}e{decade}") for digit in (1, 3) for decade in DECADES]

    def _round_linear(self) -> list[float]:
        """Return two to six multiples of 1, 2 or 5 times a power of ten."""
        steps = [float(f"{digit}e{decade}") for decade in DECADES for digit in (1, 2, 5)]
        step = next(step for step in steps if self._high - self._low <= 5 * step)
        multiples = range(math.ceil(self._low / step), math.floor(self._high / step) + 1)
        return [step * multiple for multiple in multiples]
