"""Render the page of one run or many: one self-contained HTML file that runs only its scripts."""

import json
import math
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

import yaml
from plotly.offline import get_plotlyjs

from mingpt_ddp.errors import command, counted, printable
from mingpt_ddp.results.analysis.verdict import sentences
from mingpt_ddp.results.elements import bullets, grid, table
from mingpt_ddp.results.formats import command_line, cut, duration, fixed, shown, when, words
from mingpt_ddp.results.groups import Group, recipe, singles
from mingpt_ddp.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.results.page import one_run
from mingpt_ddp.results.page.figures import DRAWN, SERIES, Mark, mean_curve, parameters
from mingpt_ddp.results.page.plots import Plots, legend_of
from mingpt_ddp.results.report_text import cells_of, with_interval
from mingpt_ddp.results.results import Results
from mingpt_ddp.results.runs import Job, Value, identity, number, varying, why_no_best
from mingpt_ddp.storage.code_identity import describe, recorded_code

IMPORTANCE = (
    "Importance: how much the values of a parameter differ between the best groups and all "
    "(PED-ANOVA), as shares; the most important comes first."
)
BARS = "Bars: the 95% interval of each mean. They can overlap where a comparison by seed differs."
MOST_SENTENCES = 12  # of the verdict
OTHER_CURVES = 16  # of one run
FIXED = {"data.name": "data", "data.path": "path", "model.name": "model", "run.seed": "seed"}


def render_page(title: str, results: Results, page: Path, reload_s: float = 0) -> str:
    """Return the whole document; what was asked first comes first.

    Names, values and texts of runs are untrusted: they are escaped in HTML and in plotly's labels,
    which render some tags. Only scripts with the nonce run.

    Args:
        page: its file, from which links are relative.
        reload_s: seconds after which the page reloads itself; 0: it does not.
    """
    plots = Plots(results)
    drawn = sorted(results.keys, key=lambda key: -results.importance.get(key, 0.0))[:DRAWN]
    verdict = sentences(results.recipes, results.directories, MOST_SENTENCES)
    unread = results.unread
    sections = {
        "Result" if results.only_job else "Best configuration": _best(plots, results),
        "Comparison": bullets(results.notes + verdict),
        **_curves(plots, results),
        "Parameters": _parameters(plots, results, drawn),
        "Parallel coordinates": plots.parallel(drawn),
        "Power laws": bullets([law.sentence for law in results.laws]) + grid(plots.laws()),
        **_tables(results, page),
    }
    if results.only_job:
        ranks, notes = one_run.read_ranks(results.only_job.directory / "tensorboard")
        unread += notes
        sections["Samples"] = one_run.samples(ranks)
        sections["Ranks"] = one_run.timings(plots, ranks)
        sections["Restarts"] = one_run.restarts(results.only_job)
    sections["Fixed settings"] = _settings(results.jobs)
    sections["Notes"] = bullets(unread)
    body = f"<h1>{escape(title)}</h1><p>{escape(_summary(results))}</p>"
    if reload_s:
        body += f"<p>Running: as of {when(time.time())}; this page reloads itself.</p>"
    for heading, content in sections.items():
        if content:
            body += f"<h2>{heading}</h2>{content}"
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=printable(escape(title)),
        body=printable(body),
        reload_ms=round(1000 * reload_s),
        figures=json.dumps(plots.figures).replace("<", "\\u003c"),  # cannot close the element
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(),
    )


def _summary(results: Results) -> str:
    jobs = results.jobs
    statuses = [job.status for job in jobs]
    counts = [f"{statuses.count(status)} {shown(status)}" for status in dict.fromkeys(statuses)]
    total = counted(len(jobs), "job")
    if results.has_replicates:
        total += f" in {len(results.groups)} groups that differ in more than run.seed"
    everything = Group(jobs, {})
    took = duration(everything.seconds)
    took = f", {took} of training" if took else ""
    return f"{total}: {', '.join(counts)}{took}. Faults survived: {everything.faults or 0}."


def _best(plots: Plots, results: Results) -> str:
    """Describe the best row, or the only run."""
    best = results.best
    only = results.only_job
    if best is None and only is None:
        return f"<p>{why_no_best(results.jobs).capitalize()}.</p>"
    best = best or results.groups[0]
    ranked_by = best.ranked_by
    title = ranked_by.title if ranked_by.note else ranked_by.title.capitalize()
    text = f"{title} {with_interval(best.latest)}"
    if best.objective is None:
        text += f" so far, at step {fixed(best.first.step, 'd')}: {shown(best.status)}"
    if results.has_replicates:
        text += f", mean of {counted(best.complete, 'seed')}"
    for key in sorted(best.first.result):
        estimate = best.estimate_of(partial(_number, key=key))
        if estimate.mean is not None and key.startswith("val_") and key != ranked_by.series:
            text += f", {cut(words(key))} {with_interval(estimate)}"
    text = ", ".join([escape(text), *parameters(best, plots.names)])
    html = f"<p>{text}.</p><pre>{escape(command_line(best.first))}</pre>"
    return html + (_numbers(only) if only else "")


def _number(job: Job, key: str) -> float | None:
    return number(job.result.get(key))


def _numbers(job: Job) -> str:
    """Return the table of all numbers of a result."""
    rows = []
    for key in job.result:
        value = _number(job, key)
        if value is not None:
            rows.append({"what": cut(words(str(key))), "value": fixed(value, ".6g")})
    return table(rows)


def _curves(plots: Plots, results: Results) -> dict[str, str]:
    """Draw the losses; of one run all other measurements too."""
    if results.only_job is None:
        objective = results.objective
        training = "training loss"
        if objective is BITS_PER_BYTE:
            training += ", per token of each tokenizer"
        curves = plots.curves(objective.series, objective.title)
        curves += plots.curves("train_loss", training)
        return {"Loss curves": curves and f"<p>{plots.legend()}</p>{grid(curves)}"}
    history = results.only_job.history
    marks = [Mark(SERIES[0], "training"), Mark(SERIES[1], "validation")]
    losses = ["train_loss", LOSS.series]
    series = [mean_curve([history.series(key)]) for key in losses]
    curves = plots.series([*zip(marks, series, strict=True)], "loss", 380)
    others = [key for key in history.columns if key not in losses][:OTHER_CURVES]
    dotted = " &nbsp;Dotted: a restart." if len(history.attempts) > 1 else ""
    return {
        "Losses": curves and f"<p>{legend_of(marks)}{dotted}</p>{curves}",
        "Learning rate, speed and metrics": grid(
            "".join(plots.curves(key, words(key), 260) for key in others)
        ),
    }


def _parameters(plots: Plots, results: Results, keys: list[str]) -> str:
    """Draw the objective over each parameter, and how much each matters."""
    figures = grid("".join(plots.against(key) for key in keys))
    more = len(results.keys) - len(keys)
    if more:
        figures = f"<p>The first {DRAWN}; the table has the other {more}.</p>{figures}"
    if results.has_replicates and figures:
        figures = f"<p>{BARS}</p>{figures}"
    return f"<p>{IMPORTANCE}</p>{figures}" if results.importance else figures


def _tables(results: Results, page: Path) -> dict[str, str]:
    """Return the table of the groups, if there are replicates, and that of the jobs."""
    jobs = results.jobs
    ranks = [*map(str, range(1, len(results.groups) + 1))]
    rank_of = dict[Path, str]()
    for rank, group in zip(ranks, results.groups, strict=True):
        rank_of |= {job.directory: rank for job in group.jobs}
    alone = results
    if results.has_replicates:
        alone = replace(results, groups=singles(jobs), keys=varying(jobs))
    links = [_link(job, page) for job in jobs]
    hint = f"A row links to the page of its run, once `{command('report')} RUN` has written it."
    listed = _table(alone, [rank_of[job.directory] for job in jobs], links)
    return {
        "Groups": _table(results, ranks) if results.has_replicates else "",
        "Jobs": f"<p>{escape(hint)}</p>{listed}" if len(jobs) > 1 else "",
    }


def _table(results: Results, ranks: list[str], links: Sequence[str] = ()) -> str:
    rows = []
    for rank, group in zip(ranks, results.groups, strict=True):
        cells = cells_of(results, group, results.keys, short=False)
        rows.append({"#": rank, **cells, "directory": cut(group.name)})
    return table(rows, links)


def _link(job: Job, page: Path) -> str:
    """Return the URL of the page of a run, relative to this page; "" if there is none."""
    target = job.directory / page.name
    if not target.is_file():
        return ""
    return quote(os.path.relpath(target, page.parent), errors="replace")


def _settings(jobs: list[Job]) -> str:
    """Return what is the same in all jobs: data, model and date in words, then all keys."""
    first = jobs[0].config
    if not first:
        return ""
    same = set.intersection(*(set(recipe(job, job.config)) for job in jobs))
    config = {key: value for key, value in first.items() if (key, identity(value)) in same}
    known_facts = [key for key in FIXED if config.get(key) is not None]
    facts = [f"{FIXED[key]} {shown(config[key])}" for key in known_facts]
    sizes = {_number(job, "parameters") for job in jobs}
    facts += [f"{size:,.0f} parameters" for size in sizes if size and len(sizes) == 1]
    codes = {describe(code) for code in map(recorded_code, [job.result for job in jobs]) if code}
    facts += [f"code {code}" for code in codes if len(codes) == 1]
    facts.append(f"begun {when(min(job.metrics.began for job in jobs))}")
    groups: dict[str, dict[str, Value]] = {}
    for key, value in config.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    lines = [f"{group}: {_flow(values)}" for group, values in groups.items()]
    return f"<p>{escape(', '.join(facts))}</p><pre>{escape(''.join(lines))}</pre>"


def _flow(values: dict[str, Value]) -> str:
    """Return YAML on one line, which the page wraps."""
    return yaml.safe_dump(
        values, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
