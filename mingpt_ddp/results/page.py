"""Render the page of a report: one self-contained HTML file that runs only its own scripts."""

import json
import secrets
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from mingpt_ddp.errors import counted
from mingpt_ddp.results.figures import DRAWN
from mingpt_ddp.results.formats import cut, short_names, shown
from mingpt_ddp.results.groups import singles
from mingpt_ddp.results.laws import draw_power_laws, power_law_lines
from mingpt_ddp.results.objective import LOSS, Objective
from mingpt_ddp.results.plots import Plots
from mingpt_ddp.results.results import Results
from mingpt_ddp.results.runs import Job, command_line, varying, why_no_best
from mingpt_ddp.results.search_plots import draw_front, draw_importance
from mingpt_ddp.results.text import columns_of, count_seeds, front_line, with_interval

IMPORTANCE = (
    "How much the values of a parameter differ between the best groups and all (PED-ANOVA)."
)


def render_page(title: str, results: Results) -> str:
    """Return the whole document.

    Names and values of runs are untrusted: they are escaped in HTML and in plotly's labels, which
    render some tags. Only scripts with the nonce run.
    """
    keys = results.keys
    plots = Plots(results.groups, keys)
    more = ""
    if len(keys) > DRAWN:
        more = f"The first {DRAWN} parameters; the table has the other {len(keys) - DRAWN}."
    curves = _curves(plots, results.objective)
    front = ""
    if results.front:
        front = f"<p>{escape(front_line(results.front))}</p>"
        if len(results.front.goals) > 1:
            front += draw_front(plots.figures, results.front, plots.hovers)
    against = "".join(plots.against(key) for key in keys[:DRAWN])
    importance = draw_importance(plots.figures, results.importance)
    parallel = plots.parallel(keys[:DRAWN])
    laws = draw_power_laws(plots.figures, results.laws)
    unread: list[str] = []
    for job in results.jobs:
        unread += job.notes
    sections = {
        "Comparison": html_list(results.notes),
        "Best configuration": _best(results),
        "Loss curves": curves and f"<p>{plots.legend()}</p>{html_grid(curves)}",
        "Objectives": front,
        "Objective against each parameter": against and f"<p>{more}</p>{html_grid(against)}",
        "Power laws": laws and html_list(power_law_lines(results.laws)) + html_grid(laws),
        "Importance of the parameters": importance and f"<p>{IMPORTANCE}</p>{importance}",
        "Parallel coordinates": parallel and f'<div class="wide">{parallel}</div>',
        "Groups": _groups(results),
        "Jobs": _jobs(results),
        "Notes": html_list(unread),
    }
    return document(title, _summary(results), sections, plots.figures)


def _curves(plots: Plots, objective: Objective) -> str:
    training = "training loss"
    if objective is not LOSS:
        training += ", per token of each tokenizer"
    return plots.curves(objective.series, objective.title) + plots.curves("train_loss", training)


def _summary(results: Results) -> str:
    jobs = results.jobs
    statuses = [job.status for job in jobs]
    counts = [f"{statuses.count(status)} {shown(status)}" for status in dict.fromkeys(statuses)]
    faults = sum(job.faults or 0 for job in jobs)
    total = counted(len(jobs), "job")
    if results.has_replicates:
        total += f" in {len(results.groups)} groups that differ in more than run.seed"
    return f"{total}: {', '.join(counts)}. Faults survived: {faults}."


def document(
    title: str, summary: str, sections: dict[str, str], figures: list[dict[str, Any]]
) -> str:
    """Return the whole document.

    Args:
        title, summary: texts.
        sections: HTML by heading; without those that are "".
        figures: of plotly, one for each element that `draw` has returned.
    """
    body = f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>"
    for heading, content in sections.items():
        if content:
            body += f"<h2>{heading}</h2>{content}"
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title),
        body=body,
        figures=json.dumps(figures).replace("<", "\\u003c"),  # cannot close the script element
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(),
    )


def html_list(texts: list[str]) -> str:
    """Return a bulleted list; "" without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def html_grid(figures: str) -> str:
    """Return the elements of several figures, in rows."""
    return f'<div class="plots">{figures}</div>'


def html_table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table that can be sorted by each column, and scrolls."""
    head = "".join(f"<th><button>{escape(title)}</button></th>" for title in titles)
    body = "".join(f"<tr><td>{'<td>'.join(map(escape, row))}" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</thead><tbody>{body}</tbody></table></div>'


def _best(results: Results) -> str:
    best = results.best
    names = short_names(results.keys)
    if best is None:
        return f"<p>{why_no_best(results.jobs).capitalize()}.</p>"
    ranked_by = best.ranked_by
    text = f"{ranked_by.title.capitalize()} {with_interval(best.estimate)}"
    if results.has_replicates:
        text += f", mean of {count_seeds(best)}"
    metrics = {LOSS.title: best.estimate_of(lambda job: job.val_loss)}
    for name in best.first.metrics:
        metrics[name] = best.estimate_of(partial(_metric, name=name))
    for name, found in metrics.items():
        if name not in (ranked_by.title, ranked_by.metric):
            text += f", {cut(name)} {with_interval(found)}"
    for key in results.keys:
        if key in best.config:
            text += f", {names[key]} {shown(best.config[key])}"
    return f"<p>{escape(text)}.</p><pre>{escape(command_line(best.first))}</pre>"


def _metric(job: Job, name: str) -> float | None:
    return job.metrics.get(name)


def _groups(results: Results) -> str:
    """Return the table of the groups, or "" without replicates."""
    if not results.has_replicates:
        return ""
    rows = []
    for index, group in enumerate(results.groups):
        columns = columns_of(results, index, results.keys, short=False)
        rows.append([("#", _rank(results, index)), *columns, ("directories", cut(group.name))])
    return _table(rows)


def _rank(results: Results, index: int) -> str:
    """Return the rank of a group, with a star if it is on the Pareto front."""
    star = " *" if results.front and index in results.front.members else ""
    return f"{index + 1}{star}"


def _jobs(results: Results) -> str:
    """Return the table of the jobs, with the rank of their group if there are replicates."""
    alone = results
    if results.has_replicates:
        jobs = results.jobs
        alone = replace(results, groups=singles(jobs), keys=varying(jobs), front=None)
    ranks = dict[Path, str]()
    for index, group in enumerate(results.groups):
        ranks |= {job.directory: _rank(results, index) for job in group.jobs}
    rows = []
    for index, job in enumerate(results.jobs):
        columns = columns_of(alone, index, alone.keys, short=False)
        rows.append([("#", ranks[job.directory]), *columns, ("directory", cut(job.name))])
    return _table(rows)


def _table(rows: list[list[tuple[str, str]]]) -> str:
    """Return the table of rows of the same titles and their cells."""
    titles = [title for title, _ in rows[0]]
    return html_table(titles, [[cell for _, cell in row] for row in rows])
