"""The figures that compare groups: curves, parameters, parallel coordinates."""

import math
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from plotly.colors import sample_colorscale

from mingpt_ddp.results.bands import band, error_bars, mean_curve
from mingpt_ddp.results.figures import (
    COLOURS,
    DRAWN,
    INCOMPLETE,
    draw,
    highest,
    label,
    loss_axis,
    tick_labels,
)
from mingpt_ddp.results.formats import brief, fixed, short_names, shown
from mingpt_ddp.results.groups import Group, best_group, has_replicates
from mingpt_ddp.results.intervals import Estimate
from mingpt_ddp.results.runs import Value, identity, number

LACKING = -0.16  # position on the axis, from 0 to 1, of a parameter that the job lacks
# a plotly template; inserted text is literal
CURVE_HOVER = "step %{x}: %{y:.4f}<br>%{text}<extra></extra>"
LABEL = {
    "showarrow": False,
    "xanchor": "right",
    "xshift": -5,
    "font": {"size": 11},
    "bgcolor": "white",
}


class Plots:
    """The figures of a page, as plain data for plotly; the best group is drawn last, on top.

    Without replicates each job is a group.
    """

    def __init__(self, groups: list[Group], keys: list[str]) -> None:
        self.figures: list[dict[str, Any]] = []
        self._groups = groups[::-1]
        self._best = best_group(groups)
        self._title = groups[0].ranked_by.title
        self._names = short_names(keys)
        self._objectives = [group.objective for group in groups if group.objective is not None]
        known = [group.value for group in groups if group.value is not None]
        self._highest = highest(self._objectives or known)
        self.hovers = [self._hover(rank, group) for rank, group in enumerate(groups, start=1)]
        self._ranks = {group.first.directory: rank for rank, group in enumerate(groups)}

    def _hover(self, rank: int, group: Group) -> str:
        """Return what a point of the group shows: rank, status, objective, parameters."""
        value = "" if group.value is None else f", {self._title} {brief(group.value)}"
        if group.latest and group.latest.half_width is not None:
            value += f" ± {brief(group.latest.half_width)}"
        lines = [f"{group.seeds} seeds"] if group.seeds > 1 else []
        lines += self._parameters(group)[:DRAWN]
        return "<br>".join([f"<b>#{rank}</b> {label(group.status)}{value}", *lines])

    def _text(self, group: Group) -> str:
        return self.hovers[self._ranks[group.first.directory]]

    def _parameters(self, group: Group) -> list[str]:
        """Return `name: value` of each parameter, escaped."""
        lines = []
        for key, name in self._names.items():
            if key in group.config:
                lines.append(f"{label(name)}: {label(shown(group.config[key]))}")
        return lines

    def legend(self) -> str:
        """Return the legend of the colours, as HTML; a few groups of replicates are named."""
        text = ""
        if self._objectives:
            low = fixed(min(self._objectives), ".3f")
            more = " or more" * (max(self._objectives) > self._highest)
            text = f"Blue to orange: objectives from {low} to {fixed(self._highest, '.3f')}{more}. "
        incomplete = f"Grey, dashed or hollow: not complete, the last {self._title}."
        text += incomplete * (len(self._objectives) < len(self._groups))
        if not has_replicates(self._groups):
            return text
        text += "Lines: means over the seeds; shaded: the 95% interval of the mean."
        return text + self._named() * (len(self._groups) <= DRAWN)

    def _named(self) -> str:
        """Return the parameters of each group after a square of its colour."""
        entries = []
        for group in reversed(self._groups):
            square = f'<span style="color:{self._colour(group)}">&#9632;</span>'
            entries.append(f"{square}&nbsp;{', '.join(self._parameters(group))}")
        return "<br>" + "<br>".join(entries)

    def curves(self, key: str, title: str) -> str:
        """Draw a measurement over the steps of every group that has logged it.

        A single one is a point. Replicates are a line through their means in a band.
        """
        traces: list[dict[str, Any]] = []
        drawn: list[float] = []
        for group in self._groups:
            curve = mean_curve(group, key)
            if not curve:
                continue
            steps = [step for step, _ in curve]
            means = [found.mean for _, found in curve]
            drawn += means
            if group.seeds > 1 and len(curve) > 1:
                traces.append(band(curve, self._colour(group)))
            traces.append(self._line(group, steps, means) | {"hovertemplate": CURVE_HOVER})
            if len(steps) == 1:
                symbol = self._symbol(group, "circle")
                marker = {"symbol": symbol, "size": self._size(group), "color": self._colour(group)}
                traces[-1] |= {"mode": "markers", "marker": marker}
        layout = {
            "title": {"text": title},
            "xaxis": {"title": {"text": "step"}},
            "yaxis": loss_axis(drawn, title.partition(",")[0]),
        }
        return draw(self.figures, traces, layout, 340)

    def against(self, key: str) -> str:
        """Draw the objective over one parameter, with error bars; outliers are triangles."""
        groups = [group for group in self._groups if key in group.config and group.latest]
        at, ticks = _positions(group.config[key] for group in groups)
        x = []
        found: list[Estimate] = []
        symbols = []
        for group in groups:
            assert group.latest is not None
            is_outlier = group.latest.mean > self._highest
            x.append(at[identity(group.config[key])])
            found.append(group.latest)
            symbols.append(self._symbol(group, "triangle-up" if is_outlier else "circle"))
        y = [min(each.mean, self._highest) for each in found]
        yaxis = loss_axis([*y, *self._spreads(found)], self._title)
        colours = [self._colour(group) for group in groups]
        trace = {
            "mode": "markers",
            "cliponaxis": False,
            "x": x,
            "y": y,
            "text": [self._text(group) for group in groups],
            "marker": {
                "symbol": symbols,
                "size": [self._size(group) for group in groups],
                "color": colours,
                "line": {"color": colours, "width": 1.5},
            },
        }
        if any(each.deviation is not None for each in found):
            trace["error_y"] = error_bars(found, y, yaxis["range"])
        title = {"text": label(self._names[key])}
        layout = {
            "xaxis": {"title": title, "range": [-0.15, 1.15], **tick_labels(ticks)},
            "yaxis": yaxis,
        }
        return draw(self.figures, [trace] if groups else [], layout, 260)

    def _spreads(self, found: list[Estimate]) -> list[float]:
        """Return what the axis shows of the error bars: a standard deviation on both sides."""
        ends = []
        for each in found:
            if each.deviation is not None and each.mean <= self._highest:
                ends += [each.mean - each.deviation, each.mean + each.deviation]
        return ends

    def parallel(self, keys: list[str]) -> str:
        """Draw a line per group through its parameters to its objective.

        It is below the axes of the parameters that the group lacks.
        """
        groups = [group for group in self._groups if any(key in group.config for key in keys)]
        columns = [self._column(groups, key) for key in [*keys, None]]
        heights: dict[Path, list[float]] = {group.first.directory: [] for group in groups}
        labels = []
        for axis, values in enumerate(columns):
            at, ticks = _positions(values.values())
            if len(values) < len(groups):
                ticks[LACKING] = "none"
            for directory, ys in heights.items():
                lacks = directory not in values
                ys.append(LACKING if lacks else at[identity(values[directory])])
            labels += [{**LABEL, "x": axis, "y": y, "text": text} for y, text in ticks.items()]
        x = range(len(columns))
        lines = [self._line(group, x, heights[group.first.directory]) for group in groups]
        names = [*(label(self._names[key], 18) for key in keys), self._title]
        top = {
            "side": "top",
            "range": [-0.65, len(keys) + 0.5],
            **tick_labels(dict(enumerate(names))),
        }
        layout = {
            "xaxis": top,
            "yaxis": {"visible": False, "range": [LACKING - 0.08, 1.05]},
            "annotations": labels,
            "margin": {"l": 0, "r": 0, "t": 40, "b": 10},
        }
        return draw(self.figures, lines if keys else [], layout, 360, 105 * len(columns))

    def _column(self, groups: list[Group], key: str | None) -> dict[Path, Value]:
        """Return the values of a parameter, or of the objective without one, by first directory."""
        found: dict[Path, Value] = {}
        for group in groups:
            if key is None and group.value is not None:
                found[group.first.directory] = min(group.value, self._highest)
            elif key is not None and key in group.config:
                found[group.first.directory] = group.config[key]
        return found

    def _line(self, group: Group, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
        width = 3.5 if group is self._best else 1.5
        dash = "solid" if group.objective is not None else "dash"
        return {
            "mode": "lines",
            "x": [*x],
            "y": [*y],
            "line": {"color": self._colour(group), "width": width, "dash": dash},
            "text": self._text(group),
        }

    def _size(self, group: Group) -> int:
        return 13 if group is self._best else 9

    def _symbol(self, group: Group, shape: str) -> str:
        return shape if group.objective is not None else f"{shape}-open"

    def _colour(self, group: Group) -> str:
        if group.objective is None:
            return INCOMPLETE
        low = min(self._objectives)
        share = (min(group.objective, self._highest) - low) / ((self._highest - low) or 1.0)
        return str(sample_colorscale(COLOURS, [share])[0])


def _positions(values: Iterable[Value]) -> tuple[dict[Hashable, float], dict[float, str]]:
    """Return the positions of values on an axis from 0 to 1, and the tick labels by position.

    The values are keyed by identity; labels that would overlap are left out. Numbers are on a
    linear scale, or logarithmic if they span a factor of ten; other values are equidistant.
    """
    by_identity = {identity(value): value for value in values}
    distinct = [*by_identity.values()]
    distinct.sort(key=lambda value: (number(value) is None, number(value) or 0, shown(value)))
    numbers = [known for value in distinct if (known := number(value)) is not None]
    if len(numbers) < len(distinct):
        numbers = [float(index) for index in range(len(distinct))]
    elif numbers and 0 < 10 * numbers[0] <= numbers[-1]:
        numbers = [math.log10(known) for known in numbers]
    span = numbers[-1] - numbers[0] if numbers else 0
    shares = [(known - numbers[0]) / span if span else 0.5 for known in numbers]
    at: dict[Hashable, float] = {}
    ticks: dict[float, str] = {}
    for share, value in zip(shares, distinct, strict=True):
        at[identity(value)] = share
        if not ticks or share - max(ticks) >= 0.17:
            ticks[share] = label(shown(value), 14)
    return at, ticks
