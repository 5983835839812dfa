"""Render the page of a report: one self-contained HTML file that runs only its own scripts."""

import json
import math
import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import quantiles
from string import Template
from typing import Any

from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from mingpt_ddp.metrics.objective import LOSS
from mingpt_ddp.sweeps.runs import Job, Value, best_of, command_line, identity, number, why_no_best
from mingpt_ddp.sweeps.table import brief, cells, cut, fixed, short_names, shown

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


def render_page(title: str, jobs: list[Job], keys: list[str], notes: list[str]) -> str:
    """Return the whole document.

    Names and values of runs are untrusted: they are escaped in HTML and in plotly's labels, which
    render some tags. Only scripts with the nonce run.

    Args:
        jobs: best first.
        keys: the parameters in which they differ.
        notes: on their comparison.
    """
    plots = Plots(jobs, keys)
    statuses = [job.status for job in jobs]
    counts = ", ".join(
        f"{statuses.count(status)} {shown(status)}" for status in dict.fromkeys(statuses)
    )
    faults = sum(job.faults or 0 for job in jobs)
    summary = f"{len(jobs)} job{'s' * (len(jobs) > 1)}: {counts}. Faults survived: {faults}."
    more = (
        f"The first {DRAWN} parameters; the table has the other {len(keys) - DRAWN}."
        if len(keys) > DRAWN
        else ""
    )
    objective = jobs[0].ranked_by
    training = (
        "training loss" if objective is LOSS else "training loss, per token of each tokenizer"
    )
    curves = plots.curves(objective.series, objective.title) + plots.curves("train_loss", training)
    against = "".join(map(plots.against, keys[:DRAWN]))
    parallel = plots.parallel(keys[:DRAWN])
    unread = "".join(f"<li>{escape(note)}</li>" for job in jobs for note in job.notes)
    comparison = "".join(f"<li>{escape(note)}</li>" for note in notes)
    sections = {
        "Comparison": comparison and f"<ul>{comparison}</ul>",
        "Best configuration": _best(jobs, keys),
        "Loss curves": curves and f'<p>{plots.legend()}</p><div class="plots">{curves}</div>',
        "Objective against each parameter": against
        and f'<p>{more}</p><div class="plots">{against}</div>',
        "Parallel coordinates": parallel and f'<div class="wide">{parallel}</div>',
        "Jobs": _table(jobs, keys),
        "Notes": unread and f"<ul>{unread}</ul>",
    }
    return document(title, summary, sections, plots.figures)


def document(
    title: str, summary: str, sections: dict[str, str], figures: list[dict[str, Any]]
) -> str:
    """Return the whole document.

    Args:
        title, summary: texts.
        sections: HTML by heading; without those that are "".
        figures: of plotly, one for each element that `draw` has returned.
    """
    body = "".join(
        f"<h2>{heading}</h2>{content}" for heading, content in sections.items() if content
    )
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title),
        body=f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>{body}",
        figures=json.dumps(figures).replace("<", "\\u003c"),  # cannot close the script element
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(),
    )


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


def html_table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table that can be sorted by each column, and scrolls."""
    head = "".join(f"<th><button>{escape(title)}</button></th>" for title in titles)
    body = "".join(f"<tr><td>{'<td>'.join(map(escape, row))}" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>'


def _best(jobs: list[Job], keys: list[str]) -> str:
    best = best_of(jobs)
    names = short_names(keys)
    if best is None or best.objective is None:
        return f"<p>{why_no_best(jobs).capitalize()}.</p>"
    ranked_by = best.ranked_by
    measured = {LOSS.title: best.val_loss, **best.metrics}
    others = {
        name: value
        for name, value in measured.items()
        if name not in (ranked_by.title, ranked_by.metric)
    }
    metrics = "".join(f", {cut(name)} {fixed(value, '.4f')}" for name, value in others.items())
    values = "".join(
        f", {names[key]} {shown(best.config[key])}" for key in keys if key in best.config
    )
    text = f"{ranked_by.title.capitalize()} {fixed(best.objective, '.4f')}{metrics}{values}."
    return f"<p>{escape(text)}</p><pre>{escape(command_line(best))}</pre>"


def _table(jobs: list[Job], keys: list[str]) -> str:
    names = [cut(name, LONGEST) for name in short_names(keys).values()]
    objective = jobs[0].ranked_by
    others = ["time", "directory"] if objective is LOSS else ["time", LOSS.title, "directory"]
    titles = [
        "#",
        objective.title,
        "status",
        *names,
        "step",
        f"{jobs[0].unit}/s",
        "faults",
        *others,
    ]
    rows = [[str(rank), *cells(job, keys), cut(job.name)] for rank, job in enumerate(jobs, start=1)]
    return html_table(titles, rows)


class Plots:
    """The figures of a page, as plain data for plotly; the best job is drawn last, on top."""

    def __init__(self, jobs: list[Job], keys: list[str]) -> None:
        self.figures: list[dict[str, Any]] = []
        self._jobs = jobs[::-1]
        self._best = best_of(jobs)
        self._title = jobs[0].ranked_by.title
        names = self._names = short_names(keys)
        self._objectives = [job.objective for job in jobs if job.objective is not None]
        self._highest = _highest(
            self._objectives or [job.value for job in jobs if job.value is not None]
        )
        self._hovers = {}
        for rank, job in enumerate(jobs, start=1):
            value = "" if job.value is None else f", {self._title} {brief(job.value)}"
            values = [
                f"{_label(names[key])}: {_label(shown(job.config[key]))}"
                for key in keys
                if key in job.config
            ]
            self._hovers[job.directory] = "<br>".join(
                [f"<b>#{rank}</b> {_label(job.status)}{value}", *values[:DRAWN]]
            )

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
                symbol = "circle" if job.objective is not None else "circle-open"
                marker = {
                    "symbol": symbol,
                    "size": 13 if job is self._best else 9,
                    "color": self._colour(job),
                }
                traces[-1] |= {"mode": "markers", "marker": marker}
        yaxis = loss_axis([y for trace in traces for y in trace["y"]], title.partition(",")[0])
        axes = {"xaxis": {"title": {"text": "step"}}, "yaxis": yaxis}
        return draw(self.figures, traces, {"title": {"text": title}, **axes}, 340)

    def against(self, key: str) -> str:
        """Draw the objective of every job over one parameter; outliers are triangles at the
        edge.
        """
        drawn = [
            (job, job.value) for job in self._jobs if key in job.config and job.value is not None
        ]
        at, ticks = _positions(job.config[key] for job, _ in drawn)
        values = [min(value, self._highest) for _, value in drawn]
        colours = [self._colour(job) for job, _ in drawn]
        shapes = ["circle" if value <= self._highest else "triangle-up" for _, value in drawn]
        symbols = [
            shape + "-open" * (job.objective is None)
            for shape, (job, _) in zip(shapes, drawn, strict=True)
        ]
        sizes = [13 if job is self._best else 9 for job, _ in drawn]
        marker = {
            "symbol": symbols,
            "size": sizes,
            "color": colours,
            "line": {"color": colours, "width": 1.5},
        }
        x = [at[identity(job.config[key])] for job, _ in drawn]
        texts = [self._hovers[job.directory] for job, _ in drawn]
        trace = {
            "mode": "markers",
            "cliponaxis": False,
            "x": x,
            "y": values,
            "text": texts,
            "marker": marker,
        }
        xaxis = {
            "title": {"text": _label(self._names[key])},
            "range": [-0.15, 1.15],
            **_ticks(ticks),
        }
        return draw(
            self.figures,
            [trace] if drawn else [],
            {"xaxis": xaxis, "yaxis": loss_axis(values, self._title)},
            260,
        )

    def parallel(self, keys: list[str]) -> str:
        """Draw a line per job through its parameters to its objective, below the axes of those it
        lacks.
        """
        jobs = [job for job in self._jobs if any(key in job.config for key in keys)]
        columns: list[dict[Path, Value]]
        columns = [
            {job.directory: job.config[key] for job in jobs if key in job.config} for key in keys
        ]
        columns.append(
            {job.directory: min(job.value, self._highest) for job in jobs if job.value is not None}
        )
        ways = []
        labels = []
        for column, values in enumerate(columns):
            at, ticks = _positions(values.values())
            ways.append(
                [
                    at[identity(values[j.directory])] if j.directory in values else LACKING
                    for j in jobs
                ]
            )
            ticks |= {LACKING: "none"} if len(values) < len(jobs) else {}
            labels += [{**LABEL, "x": column, "y": y, "text": text} for y, text in ticks.items()]
        lines = [
            self._line(job, range(len(columns)), y)
            for job, y in zip(jobs, zip(*ways, strict=True), strict=True)
        ]
        names = [*(_label(self._names[key], 18) for key in keys), self._title]
        xaxis = {"side": "top", "range": [-0.65, len(keys) + 0.5], **_ticks(dict(enumerate(names)))}
        yaxis = {"visible": False, "range": [LACKING - 0.08, 1.05]}
        layout = {
            "xaxis": xaxis,
            "yaxis": yaxis,
            "annotations": labels,
            "margin": {"l": 0, "r": 0, "t": 40, "b": 10},
        }
        return draw(self.figures, lines if keys else [], layout, 360, 105 * len(columns))

    def _line(self, job: Job, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
        width = 3.5 if job is self._best else 1.5
        dash = "solid" if job.objective is not None else "dash"
        line = {"color": self._colour(job), "width": width, "dash": dash}
        return {
            "mode": "lines",
            "x": [*x],
            "y": [*y],
            "line": line,
            "text": self._hovers[job.directory],
        }

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
    """Return the positions of values on an axis from 0 to 1, by identity, and the tick labels that
    fit, by position.

    Numbers are on a linear scale, or logarithmic if they span a factor of ten; other values are
    equidistant.
    """
    distinct = [*{identity(value): value for value in values}.values()]
    distinct.sort(key=lambda value: (number(value) is None, number(value) or 0, shown(value)))
    numbers = [known for value in distinct if (known := number(value)) is not None]
    if len(numbers) < len(distinct):
        numbers = [float(index) for index in range(len(distinct))]
    elif numbers and 0 < 10 * numbers[0] <= numbers[-1]:
        numbers = [math.log10(known) for known in numbers]
    span = numbers[-1] - numbers[0] if numbers else 0
    shares = [(known - numbers[0]) / span if span else 0.5 for known in numbers]
    ticks: dict[float, str] = {}
    for share, value in zip(shares, distinct, strict=True):
        if not ticks or share - max(ticks) >= 0.17:
            ticks[share] = _label(shown(value), 14)
    return {identity(value): share for share, value in zip(shares, distinct, strict=True)}, ticks


def _ticks(labels: Mapping[float, str]) -> dict[str, Any]:
    return {"tickvals": [*labels], "ticktext": [*labels.values()]}


def _highest(losses: list[float]) -> float:
    """Return the highest loss that is at most three interquartile ranges above the third
    quartile.
    """
    if len(losses) < 4:
        return max(losses, default=0.0)
    first, _, third = quantiles(losses, n=4, method="inclusive")
    return max(loss for loss in losses if loss <= third + 3 * (third - first))


def loss_axis(losses: list[float], title: str) -> dict[str, Any]:
    low = min(losses, default=0.0)
    high = _highest(losses)
    margin = 0.06 * (high - low) or 0.05 * abs(low) or 0.5
    return {"title": {"text": title}, "range": [low - margin, high + margin]}
