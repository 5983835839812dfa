"""Draw the figures of a page as traces and layouts of plotly."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from statistics import median, quantiles
from typing import Any

from plotly.colors import sample_colorscale

from mingpt_ddp.errors import printable
from mingpt_ddp.study.results.formats import (
    cut,
    format_brief,
    format_number,
    format_value,
    short_names,
    words,
)
from mingpt_ddp.study.results.groups import Group, best_group
from mingpt_ddp.study.results.results import Results
from mingpt_ddp.study.results.runs import Value, by_value, known, number
from mingpt_ddp.study.results.stats.intervals import Estimate, estimate

MAX_FIGURES = 12  # only the first parameters get a figure; the table has all parameters
CURVE_POINTS = 200  # approximate number of points in a curve
MAX_LABEL = 40  # longest name or value in a figure, in characters
# All of these colours are legible on white and on black.
BEST_TO_WORST = ["rgb(24,119,214)", "rgb(176,80,159)", "rgb(226,134,24)"]
INCOMPLETE = "rgb(138,147,158)"
TRAINING, VALIDATION = BEST_TO_WORST[0], BEST_TO_WORST[2]
# Template of the text on hover. Plotly does not expand templates in the texts that it inserts.
CURVE_HOVER = "step %{x}: %{y:.5g}<br>%{text}<extra></extra>"
# Few ticks, because more labels would overlap.
LOGARITHMIC = {"type": "log", "nticks": 4, "exponentformat": "e"}
Curve = dict[int, Estimate]  # estimates by step


@dataclass(frozen=True)
class Style:
    """The style in which all figures draw a row of the table, or a series of a single run."""

    colour: str
    text: str = ""  # HTML that plotly shows on hover
    row: str = ""  # number of the row in the table, from 1
    dash: str = "solid"
    is_best: bool = False

    @property
    def legend_entry(self) -> str:
        """The entry for this style in a legend, as HTML."""
        return f'<span style="color:{self.colour}">&#9632;</span>&nbsp;{self.text}'


class Figures:
    """Collect the figures of a page. Methods that draw return the HTML elements of the figures."""

    def __init__(self, results: Results) -> None:
        self.drawn: list[dict[str, Any]] = []
        self.names = {key: words(name) for key, name in short_names(results.keys).items()}
        self._results = results
        self._objective = objective = results.objective
        complete = known(group.objective for group in results.groups)
        costs = [*map(objective.cost, complete or known(g.value for g in results.groups))]
        self._best, self._worst = min(costs, default=0.0), highest_without_outliers(costs)
        self._has_outliers = max(costs, default=0.0) > self._worst
        best = best_group(results.groups) if len(results.groups) > 1 else None
        rows = []
        for rank, group in enumerate(results.groups, start=1):
            rows.append((group, self._style(group, str(rank), group is best)))
        self._rows = rows[::-1]  # the best row is drawn last, on top of the others

    def _style(self, group: Group, rank: str, is_best: bool) -> Style:
        text = f"<b>#{rank}</b> {label(group.status)}"
        if group.value is not None:
            text += f", {label(self._objective.title)} {format_brief(group.value)}"
        if group.latest.half_width is not None:
            text += f" ± {format_brief(group.latest.half_width)}"
        seeds = [f"{group.n_seeds} seeds"] * (group.n_seeds > 1)
        text = "<br>".join([text, *seeds, *self.parameters(group)[:MAX_FIGURES]])
        if group.objective is None:
            return Style(INCOMPLETE, text, rank, "dash")
        cost = min(self._objective.cost(group.objective), self._worst)
        share = (cost - self._best) / (self._worst - self._best or 1.0)
        colour = str(sample_colorscale(BEST_TO_WORST, [max(share, 0.0)])[0])
        return Style(colour, text, rank, is_best=is_best)

    def parameters(self, group: Group) -> list[str]:
        """Format each parameter of a row as `name: value`, escaped."""
        config = group.config
        named = [(name, config[key]) for key, name in self.names.items() if key in config]
        return [f"{label(name)}: {label(format_value(value))}" for name, value in named]

    def legend(self) -> str:
        """Explain the colours, as HTML. If there are few groups of replicates, name each group."""
        text = ""
        if any(group.objective is not None for group, _ in self._rows):
            ends = [
                format_number(self._objective.cost(cost), ".3f")
                for cost in (self._best, self._worst)
            ]
            text = f"Blue to orange: values from {' to '.join(ends)}"
            text += " or worse. " if self._has_outliers else ". "
        if any(group.objective is None for group, _ in self._rows):
            title = label(self._objective.title)
            text += (
                "Grey, dashed or hollow: jobs that are not complete or have diverged, with their "
                f"last {title}. "
            )
        if self._results.has_replicates:
            text += "Lines: means over the seeds. Shaded: the 95% interval of the mean."
            for group, style in self._rows[::-1] if len(self._rows) <= MAX_FIGURES else ():
                named = Style(style.colour, ", ".join(self.parameters(group)))
                text += f"<br>{named.legend_entry}"
        return text

    def losses(self, titles: dict[str, str]) -> str:
        """Draw measurements of each row over the steps: the mean of its seeds in a shaded band.

        Args:
            titles: Title of each figure, by the key of its measurement in metrics.jsonl.
        """
        curves: dict[str, list[tuple[Style, Curve]]] = {key: [] for key in titles}
        for group, style in self._rows:
            series: dict[str, list[list[tuple[int, float]]]] = {key: [] for key in titles}
            for job in group.samples:
                history = job.history
                for key in titles:
                    series[key].append(history.series(key))
            for key in titles:
                curves[key].append((style, mean_curve(series[key])))
        return "".join(self.curves(curves[key], title, 340) for key, title in titles.items())

    def curves(
        self,
        curves: list[tuple[Style, Curve]],
        title: str,
        height: int = 260,
        restarts: Iterable[float] = (),
    ) -> str:
        """Draw curves over the steps, with a dotted line at each restart.

        Args:
            curves: Each curve with its style.
            restarts: Steps at which the run was restarted.
        """
        traces: list[dict[str, Any]] = []
        values: list[float] = []
        starts: list[float] = []
        for style, curve in curves:
            steps = [*curve]
            means = known(each.mean for each in curve.values())
            if any(each.half_width for each in curve.values()):
                traces.append(_band(style, curve))
            if means:
                line = {"color": style.colour, "width": 3.5 if style.is_best else 1.6}
                traces.append(
                    {
                        # A line through a single point would be invisible.
                        "mode": "lines" if len(means) > 1 else "markers",
                        "x": steps,
                        "y": [*map(rounded, means)],
                        "line": {**line, "dash": style.dash},
                        "marker": {"color": style.colour, "size": 9},
                        "text": style.text,
                        "name": style.row,
                        "hovertemplate": CURVE_HOVER,
                    }
                )
            values += means
            starts += means[:1]
        across = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
        across["line"] = {"color": INCOMPLETE, "width": 1, "dash": "dot"}
        shapes = [{**across, "x0": step, "x1": step} for step in restarts]
        # Move the labels of the steps down, below the lowest label of the other axis.
        x = {"title": {"text": "step"}, "rangemode": "tozero", "ticklabelstandoff": 8}
        y = {"range": _visible_range(values, starts)}
        return self._draw(traces, x, y, height, title={"text": label(title, 60)}, shapes=shapes)

    def over_parameter(self, key: str) -> str:
        """Draw the objective of each row over one parameter, with error bars.

        A row that is worse by far is drawn as a triangle, at the height of the worst other row.

        Args:
            key: Key of the parameter.
        """
        rows = [row for row in self._rows if key in row[0].config and row[0].value is not None]
        if not rows:
            return ""
        values = [group.config[key] for group, _ in rows]
        axis, x = parameter_axis(values, key in self._results.logarithmic)
        axis["title"] = {"text": label(self.names[key])}
        y, bars, symbols = [], [], []
        for group, _ in rows:
            cost = self._objective.cost(group.value or 0.0)
            is_outlier = cost > self._worst
            y.append(self._objective.cost(min(cost, self._worst)))
            bars.append(0.0 if is_outlier else group.latest.half_width or 0.0)
            shape = f"triangle-{'down' if self._objective.maximize else 'up'}"
            symbol = shape if is_outlier else "circle"
            symbols.append(symbol if group.objective is not None else f"{symbol}-open")
        colours = [style.colour for _, style in rows]
        marker = {
            "color": colours,
            "symbol": symbols,
            "size": [13 if style.is_best else 9 for _, style in rows],
            "line": {"color": colours, "width": 1.5},
        }
        trace: dict[str, Any] = {"mode": "markers", "x": x, "y": y, "marker": marker}
        trace["text"] = [style.text for _, style in rows]
        trace["ids"] = [style.row for _, style in rows]
        if any(bars):
            trace["error_y"] = {"array": bars, "color": INCOMPLETE, "thickness": 1.5, "width": 4}
        return self._draw([trace], axis, {"title": {"text": label(self._objective.title)}}, 260)

    def _draw(
        self,
        traces: list[dict[str, Any]],
        x: dict[str, Any],
        y: dict[str, Any],
        height: int,
        **layout: Any,
    ) -> str:
        """Add a figure with these axes, and return its HTML element. Return "" without traces."""
        if not traces:
            return ""
        self.drawn.append({"data": traces, "layout": {"xaxis": x, "yaxis": y, **layout}})
        return f'<div class="plot" style="height:{height}px"></div>'


def _band(style: Style, curve: Curve) -> dict[str, Any]:
    """Return a trace that shades the intervals of a curve."""
    steps = [*curve]
    intervals = [*curve.values()]
    ends = known([each.high for each in intervals] + [each.low for each in intervals[::-1]])
    return {
        "mode": "none",
        "x": steps + steps[::-1],
        "y": [*map(rounded, ends)],
        "fill": "toself",
        "fillcolor": style.colour.replace("rgb(", "rgba(").replace(")", ",0.16)"),
        "hoverinfo": "skip",
        "name": style.row,
    }


def parameter_axis(
    values: list[Value], is_logarithmic: bool
) -> tuple[dict[str, Any], list[float] | list[str]]:
    """Choose the axis of a parameter. Return it, and the positions of the values on it.

    Numbers have a linear or a logarithmic axis. If any value is not a number, each value is a
    category.
    """
    numbers = known(map(number, values))
    if len(numbers) == len(values):
        is_logarithmic = is_logarithmic and min(numbers) > 0
        return (dict(LOGARITHMIC) if is_logarithmic else {"type": "linear"}), numbers
    ordered = sorted(values, key=lambda value: (*by_value(number(value)), format_value(value)))
    names = [*dict.fromkeys(map(_category, ordered))]
    short = {name: label(name, 14) for name in names}
    return {"type": "category", "categoryarray": names, "labelalias": short}, [
        *map(_category, values)
    ]


def _category(value: Value) -> str:
    """Return the name of a value on an axis of categories."""
    return label(format_value(value), 100)


def mean_curve(curves: Iterable[Iterable[tuple[int, float]]]) -> Curve:
    """Average curves over the steps that they share, at about CURVE_POINTS of these steps."""
    measured = [{x: y for x, y in curve if None not in (number(x), number(y))} for curve in curves]
    measured = [curve for curve in measured if curve]
    steps = sorted(set.intersection(*map(set, measured))) if measured else []
    kept = dict.fromkeys([*steps[:: len(steps) // CURVE_POINTS + 1], *steps[-1:]])
    return {step: estimate([curve[step] for curve in measured]) for step in kept}


def _visible_range(values: list[float], starts: list[float]) -> list[float]:
    """Return a range of the axis that shows all values except outliers.

    It also shows at least half of the starts.

    Args:
        starts: The first value of each curve.
    """
    low = min(values, default=0.0)
    high = max([highest_without_outliers(values), *([median(starts)] if starts else [])])
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return [low - margin, high + margin]


def highest_without_outliers(values: list[float]) -> float:
    """Return the highest value within three interquartile ranges above the third quartile."""
    if len(values) < 4:
        return max(values, default=0.0)
    first, _, third = quantiles(values, n=4, method="inclusive")
    return max(value for value in values if value <= third + 3 * (third - first))


def label(text: str, longest: int = MAX_LABEL) -> str:
    """Escape a text for plotly, which renders tags and entities in labels."""
    return escape(printable(cut(text, longest)), quote=False)


def rounded(value: float) -> float:
    """Round to the digits that a figure can show. This makes the page a third as large."""
    return float(f"{value:.6g}")
