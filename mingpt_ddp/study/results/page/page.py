"""Render the page of one run or of several: one HTML file that loads nothing from elsewhere."""

import json
import math
import secrets
import time
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template

import yaml
from plotly.offline import get_plotlyjs

from mingpt_ddp.errors import counted, printable
from mingpt_ddp.metrics.samples import read_samples
from mingpt_ddp.storage.code_identity import describe, recorded_code
from mingpt_ddp.study.results.analysis.verdict import sentences
from mingpt_ddp.study.results.formats import (
    command_line,
    cut,
    duration,
    format_number,
    format_time,
    format_value,
    words,
)
from mingpt_ddp.study.results.groups import Group, recipe, singles
from mingpt_ddp.study.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.study.results.page.figures import (
    MAX_FIGURES,
    TRAINING,
    VALIDATION,
    Figures,
    Style,
    mean_curve,
)
from mingpt_ddp.study.results.report_text import Cells, cells_of, used_columns, with_interval
from mingpt_ddp.study.results.results import Results
from mingpt_ddp.study.results.runs import (
    RunRecord,
    Value,
    identity,
    known,
    number,
    varying,
    why_no_best,
)

BARS_NOTE = (
    "Bars: the 95% interval of each mean. They can overlap even if a comparison seed by "
    "seed shows a difference."
)
MAX_SENTENCES = 12  # largest number of sentences in the verdict of a page
MAX_OTHER_CURVES = 16  # largest number of figures besides the losses, for a single run
MAX_SAMPLES = 12  # approximate number of generated texts on the page of a single run
MAX_SAMPLE_LENGTH = 2000  # longest part of a generated text, in characters


def render_page(title: str, results: Results, reload_s: float = 0) -> str:
    """Render the page of a report as an HTML document.

    Names, values and texts of runs are untrusted. They are escaped in HTML and in plotly's labels,
    which render some tags. Only scripts with the nonce run.

    Args:
        title: Title of the page.
        results: The jobs to show.
        reload_s: Interval in seconds at which the page reloads itself. 0 disables reloading.
    """
    figures = Figures(results)
    verdict = sentences(results.groups, results.directories, MAX_SENTENCES)
    unread = results.unread
    sections = {
        "Result" if results.only_job else "Best configuration": _best(figures, results),
        "Comparison": bullets(results.notes + verdict),
    }
    if results.only_job:
        sections |= _run(figures, results.only_job, unread)
    else:
        sections |= _sweep(figures, results)
    sections["Fixed settings"] = _settings(results.jobs)
    sections["Notes"] = bullets(unread)
    body = f"<h1>{escape(title)}</h1><p>{escape(_summary(results))}</p>"
    if reload_s:
        now = format_time(time.time())
        body += f"<p>Still running. This is the state at {now}; this page reloads itself.</p>"
    for heading, content in sections.items():
        if content:
            body += f"<h2>{heading}</h2>{content}"
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=printable(escape(title)),
        body=printable(body),
        reload_ms=round(1000 * reload_s),
        # With "<" escaped, no text can close the script element.
        figures=json.dumps(figures.drawn).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(),
    )


def _summary(results: Results) -> str:
    """Count the jobs by status, and add up their training time and faults, in a sentence."""
    jobs = results.jobs
    statuses = [job.status for job in jobs]
    counts = [
        f"{statuses.count(status)} {format_value(status)}" for status in dict.fromkeys(statuses)
    ]
    total = counted(len(jobs), "job")
    if results.has_replicates:
        total += f" in {len(results.groups)} groups that differ in more than run.seed"
    everything = Group(jobs, {})
    took = duration(everything.seconds)
    took = f", {took} of training" if took else ""
    return f"{total}: {', '.join(counts)}{took}. Faults survived: {everything.faults or 0}."


def _best(figures: Figures, results: Results) -> str:
    """Describe the best group, or the only run, as HTML."""
    best = results.best or (results.groups[0] if results.only_job else None)
    if best is None:
        return f"<p>{why_no_best(results.jobs).capitalize()}.</p>"
    ranked_by = best.ranked_by
    title = ranked_by.title if ranked_by.note else ranked_by.title.capitalize()
    text = f"{title} {with_interval(best.latest)}"
    if best.objective is None:
        text += (
            f" so far, at step {format_number(best.first.step, 'd')}: {format_value(best.status)}"
        )
    if results.has_replicates:
        text += f", mean of {counted(best.n_complete, 'seed')}"
    for key in sorted(best.first.result):
        estimate = best.estimate_of(lambda job, key=key: number(job.result.get(key)))  # type: ignore[misc]
        if estimate.mean is not None and key.startswith("val_") and key != ranked_by.key:
            text += f", {cut(words(key))} {with_interval(estimate)}"
    text = ", ".join([escape(text), *figures.parameters(best)])
    html = f"<p>{text}.</p><pre>{escape(command_line(best.first))}</pre>"
    return html + (_numbers(results.only_job) if results.only_job else "")


def _numbers(job: RunRecord) -> str:
    """Return a table of all numbers in a job's result."""
    rows = []
    for key in job.result:
        value = number(job.result[key])
        if value is not None:
            rows.append({"what": cut(words(str(key))), "value": format_number(value, ".6g")})
    return table(rows)


def _run(figures: Figures, job: RunRecord, unread: list[str]) -> dict[str, str]:
    """Return the sections of a single run by heading: its measurements, samples and restarts."""
    history = job.history
    restarts = {*known(number(each["step"]) for each in history.attempts[1:])}
    styles = {
        "train_loss": Style(TRAINING, "training"),
        LOSS.key: Style(VALIDATION, "validation"),
    }
    losses = [(style, mean_curve([history.series(key)])) for key, style in styles.items()]
    legend = " ".join(style.legend_entry for style in styles.values())
    legend += " &nbsp;Dotted: a restart." if restarts else ""
    curves = figures.curves(losses, "loss", 380, restarts)
    other_curves = ""
    for key in [key for key in history.columns if key not in styles][:MAX_OTHER_CURVES]:
        curve = mean_curve([history.series(key)])
        other_curves += figures.curves([(Style(TRAINING), curve)], words(key), 260, restarts)
    attempts = []
    for index, record in enumerate(history.attempts, start=1):
        row = {"attempt": str(index), "began": format_time(number(record.get("start")))}
        row |= {"after step": format_number(number(record["step"]), ".0f")}
        attempts.append(row | {"ranks": format_number(number(record.get("world_size")), ".0f")})
    return {
        "Losses": curves and f"<p>{legend}</p>{curves}",
        "Learning rate, speed and metrics": _grid(other_curves),
        "Samples": _samples(job.directory, unread),
        "Restarts": table(attempts) if restarts else "",
    }


def _samples(directory: Path, unread: list[str]) -> str:
    """Show generated texts, evenly spaced over the run. The last text is always shown."""
    try:
        texts = dict(read_samples(directory))
    except FileNotFoundError:
        return ""
    except OSError as error:
        unread.append(f"the samples cannot be read: {error}")
        return ""
    steps = sorted(texts, reverse=True)
    blocks = ""
    for step in steps[:: len(steps) // MAX_SAMPLES + 1]:
        text = escape(texts[step][:MAX_SAMPLE_LENGTH])
        blocks += f"<p>step {format_number(number(step), '.0f')}</p><pre>{text}</pre>"
    return blocks


def _sweep(figures: Figures, results: Results) -> dict[str, str]:
    """Return the sections of several jobs by heading: curves, parameters, and tables."""
    jobs = results.jobs
    objective = results.objective
    training = "training loss"
    if objective is BITS_PER_BYTE:
        training += ", per token of each tokenizer"
    curves = figures.losses({objective.key: objective.title, "train_loss": training})
    parameters = _grid("".join(map(figures.over_parameter, results.keys[:MAX_FIGURES])))
    if more := len(results.keys[MAX_FIGURES:]):
        text = f"These are the first {MAX_FIGURES} parameters; the table has the other {more}."
        parameters = f"<p>{text}</p>{parameters}"
    if results.has_replicates and parameters:
        parameters = f"<p>{BARS_NOTE}</p>{parameters}"
    ranks = [*map(str, range(1, len(results.groups) + 1))]
    rank_of = dict[Path, str]()
    for rank, group in zip(ranks, results.groups, strict=True):
        rank_of |= {job.directory: rank for job in group.jobs}
    alone = replace(results, groups=singles(jobs), keys=varying(jobs))
    return {
        "Loss curves": curves and f"<p>{figures.legend()}</p>{_grid(curves)}",
        "Parameters": parameters,
        "Groups": _rows(results, ranks) if results.has_replicates else "",
        "Jobs": _rows(alone, [rank_of[job.directory] for job in jobs]),
    }


def _rows(results: Results, ranks: list[str]) -> str:
    """Return the table of the groups.

    Args:
        ranks: The number of each row. The curves of a row have the same number.
    """
    rows = []
    for rank, group in zip(ranks, results.groups, strict=True):
        cells = cells_of(results, group, results.keys, short=False)
        rows.append({"#": rank, **cells, "directory": cut(group.name)})
    return table(rows)


def _settings(jobs: list[RunRecord]) -> str:
    """Describe the model size, code and date of the jobs, and the settings that all jobs share."""
    first = jobs[0].config
    if not first:
        return ""
    same = set.intersection(*(set(recipe(job, job.config)) for job in jobs))
    config = {key: value for key, value in first.items() if (key, identity(value)) in same}
    sizes = {number(job.result.get("parameters")) for job in jobs}
    facts = [f"{size:,.0f} parameters" for size in sizes if size and len(sizes) == 1]
    codes = {describe(code) for code in map(recorded_code, [job.result for job in jobs]) if code}
    facts += [f"code {code}" for code in codes if len(codes) == 1]
    facts.append(f"begun {format_time(min(job.metrics.began for job in jobs))}")
    groups: dict[str, dict[str, Value]] = {}
    for key, value in config.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    lines = [f"{group}: {_flow(values)}" for group, values in groups.items()]
    return f"<p>{escape(', '.join(facts))}</p><pre>{escape(''.join(lines))}</pre>"


def _flow(values: dict[str, Value]) -> str:
    """Format values as YAML on one line. The page wraps the line."""
    return yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )


def bullets(texts: list[str]) -> str:
    """Return a bulleted list as HTML, or "" without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _grid(figures: str) -> str:
    """Arrange figures in rows. Return "" without figures."""
    return figures and f'<div class="plots">{figures}</div>'


def table(rows: list[Cells]) -> str:
    """Return a scrolling table that can be sorted by each column, or "" without rows."""
    titles, cells = used_columns(rows)
    head = "".join(f"<th><button>{escape(title)}</button></th>" for title in titles)
    body = "".join(f"<tr><td>{'<td>'.join(map(escape, row))}" for row in cells)
    html = f"<table><thead><tr>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{html}</div>' if rows else ""
