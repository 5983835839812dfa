"""The figures of a page: curves, parameters, parallel coordinates, laws, one run."""

from typing import Any

from mingpt_ddp.results.formats import LONGEST, fixed, short_names, words
from mingpt_ddp.results.page.figures import (
    DRAWN,
    INCOMPLETE,
    LOG,
    OBJECTIVE,
    SERIES,
    Curve,
    Mark,
    Scale,
    axis,
    highest,
    label,
    loss_axis,
    marks_of,
    mean_curve,
    parameters,
    points,
)
from mingpt_ddp.results.results import Results
from mingpt_ddp.results.runs import Job, grouped, known, number

LACKING = -0.16  # share of the axis of a parameter that a row lacks
LAW_POINTS = 60
# plotly templates; inserted text is literal
CURVE_HOVER = "step %{x}: %{y:.5g}<br>%{text}<extra></extra>"
POINT_HOVER = "%{x}: %{y:.4f}<br>%{text}<extra></extra>"
LABEL = {
    "showarrow": False,
    "xanchor": "right",
    "xshift": -5,
    "font": {"size": 11},
    "bgcolor": "white",
}
# the ticks stand off, below a label of the other axis at its end
STEPS = axis("step", rangemode="tozero", ticklabelstandoff=8)


class Plots:
    """The figures of a page; the best row is drawn last, on top."""

    def __init__(self, results: Results) -> None:
        self.figures: list[dict[str, Any]] = []
        self._results = results
        self.names = {key: words(name) for key, name in short_names(results.keys).items()}
        self._title = label(results.objective.title)
        self._groups = results.groups[::-1]
        self._marks = marks_of(results.groups, self.names)[::-1]
        self._layout: dict[str, Any] = {}
        if results.only_job:
            self._layout["shapes"] = _restarts(results.only_job)

    def _draw(
        self,
        traces: list[dict[str, Any]],
        x: dict[str, Any],
        y: dict[str, Any],
        height: int = 340,
        **layout: Any,
    ) -> str:
        """Add a figure and return its HTML element; "" if there are no traces.

        Args:
            x, y: its axes.
        """
        if not traces:
            return ""
        self.figures.append({"data": traces, "layout": {"xaxis": x, "yaxis": y, **layout}})
        return f'<div class="plot" style="height:{height}px"></div>'

    def legend(self) -> str:
        """Return the legend of the colours, as HTML; a few groups of replicates are named."""
        text = ""
        cost = self._results.objective.cost
        costs = [*map(cost, known(group.objective for group in self._groups))]
        if costs:
            worst = highest(costs)
            beyond = " or worse" * (max(costs) > worst)
            text = f"Blue to orange: objectives from {fixed(cost(min(costs)), '.3f')} to "
            text += f"{fixed(cost(worst), '.3f')}{beyond}. "
        if len(costs) < len(self._groups):
            text += f"Grey, dashed or hollow: not complete or diverged, the last {self._title}. "
        if self._results.has_replicates:
            text += "Lines: means over the seeds; shaded: the 95% interval of the mean."
        if self._results.has_replicates and len(self._groups) <= DRAWN:
            for group, mark in zip(self._groups[::-1], self._marks[::-1], strict=True):
                text += f"<br>{_key(mark, ', '.join(parameters(group, self.names)))}"
        return text

    def curves(self, key: str, title: str, height: int = 340) -> str:
        """Draw a measurement of every row over the steps, the mean of its seeds in a band."""
        curves = []
        for group, mark in zip(self._groups, self._marks, strict=True):
            curves.append((mark, mean_curve(job.history.series(key) for job in group.samples)))
        return self.series(curves, title, height)

    def series(self, curves: list[tuple[Mark, Curve]], title: str, height: int = 260) -> str:
        """Draw curves over the steps, of one run with a dotted line at each restart."""
        traces: list[dict[str, Any]] = []
        values: list[float] = []
        starts: list[float] = []
        for mark, curve in curves:
            means = known(each.mean for each in curve.values())
            values += means
            starts += means[:1]
            if any(each.half_width for each in curve.values()):
                traces.append(mark.band([*curve], [*curve.values()]))
            if means:
                traces.append(mark.line(curve, means, hovertemplate=CURVE_HOVER))
        titled = {"title": {"text": label(title, LONGEST)}, **self._layout}
        return self._draw(traces, STEPS, loss_axis(values, starts=starts), height, **titled)

    def against(self, key: str) -> str:
        """Draw the objective over one parameter, with error bars; outliers are triangles."""
        marks = [mark for mark in self._marks if {key, OBJECTIVE} <= {*mark.values}]
        if not marks:
            return ""
        scale = Scale(mark.values[key] for mark in marks)
        x = [scale.at(mark.values[key]) for mark in marks]
        y = [mark.values[OBJECTIVE] for mark in marks]
        trace = points(marks, x, y)
        bars = [mark.spread.half_width or 0.0 for mark in marks]
        # longer bars, as of two seeds, leave the plot
        longest = max([max(y) - min(y), *(mark.spread.deviation or 0.0 for mark in marks)])
        ends = []
        for bar, at in zip(bars, y, strict=True):
            ends += [at - min(bar, longest), at + min(bar, longest)]
        if any(bars):
            trace["error_y"] = {"array": bars, "color": INCOMPLETE, "thickness": 1.5, "width": 4}
        title = label(self.names[key])
        if key in self._results.importance:
            title += f", importance {self._results.importance[key]:.2f}"
        xaxis = scale.axis(title)
        return self._draw([trace], xaxis, loss_axis(ends, self._title), 260)

    def parallel(self, keys: list[str]) -> str:
        """Draw a line per row through its parameters to its objective; "" for one parameter.

        It is below the axes of the parameters that the row lacks.
        """
        if len(keys) < 2:
            return ""
        heights: dict[Mark, list[float]] = {
            mark: [] for mark in self._marks if not mark.values.keys().isdisjoint(keys)
        }
        labels = []
        for column, key in enumerate([*keys, OBJECTIVE]):
            values = {mark: mark.values[key] for mark in heights if key in mark.values}
            scale = Scale(values.values())
            ticks = {scale.share(at): text for at, text in scale.labels.items()}
            if len(values) < len(heights):
                ticks[LACKING] = "none"
            for mark, height in heights.items():
                height.append(scale.share(scale.at(values[mark])) if mark in values else LACKING)
            labels += [{**LABEL, "x": column, "y": at, "text": text} for at, text in ticks.items()]
        places = range(len(keys) + 1)
        traces = [mark.line(places, height) for mark, height in heights.items()]
        names = [*(label(self.names[key], 18) for key in keys), self._title]
        x = {"side": "top", "range": [-0.65, len(keys) + 0.5]}
        x |= {"tickvals": [*places], "ticktext": names}
        y = {"visible": False, "range": [LACKING - 0.08, 1.05]}
        margin = {"l": 0, "r": 0, "t": 40, "b": 10}
        figure = self._draw(traces, x, y, 360, annotations=labels, margin=margin)
        width = 105 * len(places)
        return figure and f'<div class="wide"><div style="min-width:{width}px">{figure}</div></div>'

    def laws(self) -> str:
        """Draw a plot for each axis with a power law.

        Both axes are logarithmic: there the law without an offset is a straight line.
        """
        figures = ""
        for name, laws in grouped(self._results.laws, lambda law: law.axis.name).items():
            traces = []
            for colour, law in zip(SERIES, laws, strict=False):
                mark = Mark(colour, label(law.setting))
                dots = {"mode": "markers", "marker": {"color": colour, "size": 8}}
                xs = law.points(LAW_POINTS)
                traces.append(mark.line(xs, map(law.law.at, xs), hovertemplate=POINT_HOVER))
                traces.append(mark.line(law.xs, law.ys, hovertemplate=POINT_HOVER, **dots))
            x, y = (axis(title, **LOG) for title in (label(words(name)), self._title))
            figures += self._draw(traces, x, y)
        return figures


def legend_of(marks: list[Mark]) -> str:
    """Name the colours of series."""
    return " ".join(_key(mark, mark.text) for mark in marks)


def _key(mark: Mark, text: str) -> str:
    return f'<span style="color:{mark.colour}">&#9632;</span>&nbsp;{text}'


def _restarts(job: Job) -> list[dict[str, Any]]:
    steps = {number(record["step"]) for record in job.history.attempts[1:]} - {None}
    line = {"color": INCOMPLETE, "width": 1, "dash": "dot"}
    across = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return [{**across, "x0": step, "x1": step} for step in steps]
