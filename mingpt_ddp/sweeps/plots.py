"""The figures of a report, as plain data for plotly."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import quantiles
from typing import Any

from plotly.colors import sample_colorscale

from mingpt_ddp.sweeps.runs import Job, Value, best_of, identity, number
from mingpt_ddp.sweeps.table import brief, cut, fixed, short_names, shown

DRAWN = 12  # parameters with a plot; the table has all
POINTS = 200  # of a curve
LONGEST = 40  # characters of a name or value in a plot
LACKING = -0.16  # position on the axis, from 0 to 1, of a parameter that the job lacks
# best to worst, legible on white and on black
COLOURS = ["rgb(24,119,214)", "rgb(176,80,159)", "rgb(226,134,24)"]
INCOMPLETE = "rgb(138,147,158)"
# a plotly template; inserted text is literal
CURVE_HOVER = "step %{x}: %{y:.4f}<br>%{text}<extra></extra>"
LABEL = {
    "showarrow": False,
    "xanchor": "right",
    "xshift": -5,
    "font": {"size": 11},
    "bgcolor": "white",
}


def draw(
    figures: list[dict[str, Any]],
    traces: list[dict[str, Any]],
    layout: dict[str, Any],
    height: int,
    width: int = 0,
) -> str:
    """Add a figure and return its HTML element; "" if there are no traces."""
    if not traces:
        return ""
    figures.append({"data": traces, "layout": layout})
    return f'<div class="plot" style="height:{height}px;min-width:{width}px"></div>'


def thinned(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return steps and values of about POINTS points that can be drawn, the last one among them."""
    drawn = [(x, y) for x, y in points if number(x) is not None and number(y) is not None]
    kept = dict.fromkeys([*drawn[:: len(drawn) // POINTS + 1], *drawn[-1:]])
    return [x for x, _ in kept], [y for _, y in kept]


class Plots:
    """The figures of a page, as plain data for plotly; the best job is drawn last, on top."""

    def __init__(self, jobs: list[Job], keys: list[str]) -> None:
        self.figures: list[dict[str, Any]] = []
        self._jobs = jobs[::-1]
        self._best = best_of(jobs)
        self._title = jobs[0].ranked_by.title
        self._names = short_names(keys)
        self._objectives = [job.objective for job in jobs if job.objective is not None]
        known = [job.value for job in jobs if job.value is not None]
        self._highest = _highest(self._objectives or known)
        self._hovers = {}
        for rank, job in enumerate(jobs, start=1):
            self._hovers[job.directory] = self._hover(rank, job)

    def _hover(self, rank: int, job: Job) -> str:
        """Return what a point of the job shows: rank, status, objective, parameters."""
        value = "" if job.value is None else f", {self._title} {brief(job.value)}"
        lines = []
        for key, name in self._names.items():
            if key in job.config:
                lines.append(f"{_label(name)}: {_label(shown(job.config[key]))}")
        return "<br>".join([f"<b>#{rank}</b> {_label(job.status)}{value}", *lines[:DRAWN]])

    def legend(self) -> str:
        """Return the legend of the colours."""
        text = ""
        if self._objectives:
            low = fixed(min(self._objectives), ".3f")
            more = " or more" * (max(self._objectives) > self._highest)
            text = f"Blue to orange: objectives from {low} to {fixed(self._highest, '.3f')}{more}. "
        incomplete = f"Grey, dashed or hollow: not complete, the last {self._title}."
        return text + incomplete * (len(self._objectives) < len(self._jobs))

    def curves(self, key: str, title: str) -> str:
        """Draw a measurement over the steps of every job that has logged it.

        A single one is a point.
        """
        traces: list[dict[str, Any]] = []
        for job in self._jobs:
            steps, values = thinned(job.history.series(key))
            if steps:
                traces.append(self._line(job, steps, values) | {"hovertemplate": CURVE_HOVER})
            if len(steps) == 1:
                symbol = self._symbol(job, "circle")
                marker = {"symbol": symbol, "size": self._size(job), "color": self._colour(job)}
                traces[-1] |= {"mode": "markers", "marker": marker}
        drawn: list[float] = []
        for trace in traces:
            drawn += trace["y"]
        layout = {
            "title": {"text": title},
            "xaxis": {"title": {"text": "step"}},
            "yaxis": loss_axis(drawn, title.partition(",")[0]),
        }
        return draw(self.figures, traces, layout, 340)

    def against(self, key: str) -> str:
        """Draw the objective of all jobs over one parameter; outliers are triangles at the edge."""
        jobs = [job for job in self._jobs if key in job.config and job.value is not None]
        at, ticks = _positions(job.config[key] for job in jobs)
        x = []
        y = []
        symbols = []
        for job in jobs:
            assert job.value is not None
            is_outlier = job.value > self._highest
            x.append(at[identity(job.config[key])])
            y.append(min(job.value, self._highest))
            symbols.append(self._symbol(job, "triangle-up" if is_outlier else "circle"))
        colours = [self._colour(job) for job in jobs]
        trace = {
            "mode": "markers",
            "cliponaxis": False,
            "x": x,
            "y": y,
            "text": [self._hovers[job.directory] for job in jobs],
            "marker": {
                "symbol": symbols,
                "size": [self._size(job) for job in jobs],
                "color": colours,
                "line": {"color": colours, "width": 1.5},
            },
        }
        title = {"text": _label(self._names[key])}
        layout = {
            "xaxis": {"title": title, "range": [-0.15, 1.15], **_ticks(ticks)},
            "yaxis": loss_axis(y, self._title),
        }
        return draw(self.figures, [trace] if jobs else [], layout, 260)

    def parallel(self, keys: list[str]) -> str:
        """Draw a line per job through its parameters to its objective.

        It is below the axes of the parameters that the job lacks.
        """
        jobs = [job for job in self._jobs if any(key in job.config for key in keys)]
        columns = [self._column(jobs, key) for key in [*keys, None]]
        heights: dict[Path, list[float]] = {job.directory: [] for job in jobs}
        labels = []
        for axis, values in enumerate(columns):
            at, ticks = _positions(values.values())
            if len(values) < len(jobs):
                ticks[LACKING] = "none"
            for directory, ys in heights.items():
                lacks = directory not in values
                ys.append(LACKING if lacks else at[identity(values[directory])])
            labels += [{**LABEL, "x": axis, "y": y, "text": text} for y, text in ticks.items()]
        x = range(len(columns))
        lines = [self._line(job, x, heights[job.directory]) for job in jobs]
        names = [*(_label(self._names[key], 18) for key in keys), self._title]
        top = {"side": "top", "range": [-0.65, len(keys) + 0.5], **_ticks(dict(enumerate(names)))}
        layout = {
            "xaxis": top,
            "yaxis": {"visible": False, "range": [LACKING - 0.08, 1.05]},
            "annotations": labels,
            "margin": {"l": 0, "r": 0, "t": 40, "b": 10},
        }
        return draw(self.figures, lines if keys else [], layout, 360, 105 * len(columns))

    def _column(self, jobs: list[Job], key: str | None) -> dict[Path, Value]:
        """Return the values of a parameter, or of the objective without one, by job directory."""
        found: dict[Path, Value] = {}
        for job in jobs:
            if key is None and job.value is not None:
                found[job.directory] = min(job.value, self._highest)
            elif key is not None and key in job.config:
                found[job.directory] = job.config[key]
        return found

    def _line(self, job: Job, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
        width = 3.5 if job is self._best else 1.5
        dash = "solid" if job.objective is not None else "dash"
        return {
            "mode": "lines",
            "x": [*x],
            "y": [*y],
            "line": {"color": self._colour(job), "width": width, "dash": dash},
            "text": self._hovers[job.directory],
        }

    def _size(self, job: Job) -> int:
        return 13 if job is self._best else 9

    def _symbol(self, job: Job, shape: str) -> str:
        return shape if job.objective is not None else f"{shape}-open"

    def _colour(self, job: Job) -> str:
        if job.objective is None:
            return INCOMPLETE
        low = min(self._objectives)
        share = (min(job.objective, self._highest) - low) / ((self._highest - low) or 1.0)
        return str(sample_colorscale(COLOURS, [share])[0])


def _label(text: str, longest: int = LONGEST) -> str:
    """Escape a text for plotly, which renders tags and entities in labels."""
    return escape(cut(text, longest), quote=False)


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
            ticks[share] = _label(shown(value), 14)
    return at, ticks


def _ticks(labels: Mapping[float, str]) -> dict[str, Any]:
    return {"tickvals": [*labels], "ticktext": [*labels.values()]}


def _highest(losses: list[float]) -> float:
    """Return the highest loss within three interquartile ranges above the third quartile."""
    if len(losses) < 4:
        return max(losses, default=0.0)
    first, _, third = quantiles(losses, n=4, method="inclusive")
    return max(loss for loss in losses if loss <= third + 3 * (third - first))


def loss_axis(losses: list[float], title: str) -> dict[str, Any]:
    low = min(losses, default=0.0)
    high = _highest(losses)
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return {"title": {"text": title}, "range": [low - margin, high + margin]}
