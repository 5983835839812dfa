"""Render the page of a report: one self-contained HTML file that runs only its own scripts."""

import json
import secrets
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from mingpt_ddp.metrics.objective import LOSS
from mingpt_ddp.sweeps.plots import DRAWN, LONGEST, Plots
from mingpt_ddp.sweeps.runs import Job, best_of, command_line, why_no_best
from mingpt_ddp.sweeps.table import cells, cut, fixed, short_names, shown


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
    objective = jobs[0].ranked_by
    training = "training loss"
    if objective is not LOSS:
        training += ", per token of each tokenizer"
    curves = plots.curves(objective.series, objective.title) + plots.curves("train_loss", training)
    more = ""
    if len(keys) > DRAWN:
        more = f"The first {DRAWN} parameters; the table has the other {len(keys) - DRAWN}."
    against = "".join(plots.against(key) for key in keys[:DRAWN])
    parallel = plots.parallel(keys[:DRAWN])
    unread: list[str] = []
    for job in jobs:
        unread += job.notes
    sections = {
        "Comparison": html_list(notes),
        "Best configuration": _best(jobs, keys),
        "Loss curves": curves and f"<p>{plots.legend()}</p>{html_grid(curves)}",
        "Objective against each parameter": against and f"<p>{more}</p>{html_grid(against)}",
        "Parallel coordinates": parallel and f'<div class="wide">{parallel}</div>',
        "Jobs": _table(jobs, keys),
        "Notes": html_list(unread),
    }
    return document(title, _summary(jobs), sections, plots.figures)


def _summary(jobs: list[Job]) -> str:
    statuses = [job.status for job in jobs]
    counts = [f"{statuses.count(status)} {shown(status)}" for status in dict.fromkeys(statuses)]
    faults = sum(job.faults or 0 for job in jobs)
    total = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
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


def _best(jobs: list[Job], keys: list[str]) -> str:
    best = best_of(jobs)
    names = short_names(keys)
    if best is None or best.objective is None:
        return f"<p>{why_no_best(jobs).capitalize()}.</p>"
    ranked_by = best.ranked_by
    text = f"{ranked_by.title.capitalize()} {fixed(best.objective, '.4f')}"
    for name, value in {LOSS.title: best.val_loss, **best.metrics}.items():
        if name not in (ranked_by.title, ranked_by.metric):
            text += f", {cut(name)} {fixed(value, '.4f')}"
    for key in keys:
        if key in best.config:
            text += f", {names[key]} {shown(best.config[key])}"
    return f"<p>{escape(text)}.</p><pre>{escape(command_line(best))}</pre>"


def _table(jobs: list[Job], keys: list[str]) -> str:
    objective = jobs[0].ranked_by
    titles = ["#", objective.title, "status"]
    titles += [cut(name, LONGEST) for name in short_names(keys).values()]
    titles += ["step", f"{jobs[0].unit}/s", "faults", "time"]
    if objective is not LOSS:
        titles.append(LOSS.title)
    titles.append("directory")
    rows = [[str(rank), *cells(job, keys), cut(job.name)] for rank, job in enumerate(jobs, start=1)]
    return html_table(titles, rows)
