"""The page of a report: one HTML file that needs nothing but itself, and may run no script but its own."""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path

from mingpt_ddp.sweeps.command import NO_COMMAND, command_line
from mingpt_ddp.sweeps.plots import FEW, SHADES, Mark, against, curves, marks_of, parallel, shaded
from mingpt_ddp.sweeps.runs import Job, best_of
from mingpt_ddp.sweeps.svg import Markup, tag
from mingpt_ddp.sweeps.table import cells
from mingpt_ddp.sweeps.values import Value, brief, cut_inside, fixed, is_number, number, short_names, shown

MOST = 12  # parameters that are drawn; the table has them all
LONGEST_NAME = 48  # characters of a directory's name that are shown
SCRIPT = Path(__file__).with_name("page.js")
STYLE = Path(__file__).with_name("page.css")
# Colours that stand for the objective, from best to worst on a white page and the other way round on a black one: what
# is best stands out. The scale is viridis, which colour-blind readers and grey printers keep in order.
VIRIDIS = ("440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725")


def page(title: str, jobs: list[Job], keys: list[str]) -> str:
    """The whole document.

    Args:
        jobs: the best first.
        keys: the parameters in which they differ.
    """
    style, script = STYLE.read_text() + _shades(), SCRIPT.read_text()
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; form-action 'none'"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri \'none\'">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        Markup(f"<style>{style}</style>"),
    ]
    tip, last = tag("div", id="tip", role="status", hidden=""), Markup(f"<script>{script}</script>")
    body = tag("body", tag("main", *_sections(title, jobs, keys)), tip, last)
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), body, lang='en')}\n"


def _sections(title: str, jobs: list[Job], keys: list[str]) -> list[Markup]:
    marks, names = marks_of(jobs), short_names(keys)
    losses = [curves(marks, "val_loss", "validation loss"), curves(marks, "train_loss", "training loss")]
    drawn = keys[:MOST]
    return [
        _headline(title, jobs),
        _best(jobs, keys, names),
        _section("Loss curves", losses, _legend(marks, keys, names)),
        _section("Objective against each parameter", [against(marks, k, names[k]) for k in drawn], _left_out(keys)),
        _section("Parallel coordinates", [parallel(marks, drawn, names)]),
        _table(marks, keys, names),
        _notes(jobs),
    ]


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _shades() -> str:
    """A class for each colour that stands for an objective."""
    light = "".join(f".c{n}{{--c:{_shade(0.86 * n / (SHADES - 1))}}}" for n in range(SHADES))
    dark = "".join(f".c{n}{{--c:{_shade(1 - 0.82 * n / (SHADES - 1))}}}" for n in range(SHADES))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _shade(share: float) -> str:
    place = share * (len(VIRIDIS) - 1)
    low = min(math.floor(place), len(VIRIDIS) - 2)
    pairs = [(int(VIRIDIS[low][i : i + 2], 16), int(VIRIDIS[low + 1][i : i + 2], 16)) for i in (0, 2, 4)]
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs)


# The parts.


def _headline(title: str, jobs: list[Job]) -> Markup:
    statuses = [job.status for job in jobs]
    counts = [f"{statuses.count(status)} {shown(status)}" for status in dict.fromkeys(statuses)]
    faults = sum(job.faults or 0 for job in jobs)
    told = f"{len(jobs)} job{'s' * (len(jobs) != 1)}: {', '.join(counts)}. Faults survived: {faults}."
    return tag("header", tag("h1", title), tag("p", told))


def _best(jobs: list[Job], keys: list[str], names: dict[str, str]) -> Markup:
    best = best_of(jobs)
    if best is None:
        return tag("section", tag("h2", "Best configuration"), tag("p", "No job is complete."))
    words = ", ".join(f"{names[key]} {shown(best.config[key])}" for key in keys if key in best.config)
    loss = best.objective or 0.0
    nats, bits = fixed(loss, ".4f"), fixed(loss / math.log(2), ".4f")
    told = f"Validation loss {nats} nats ({bits} bits) per character{words and f': {words}'}."
    heading, line = tag("h2", "Best configuration"), command_line(best)
    if line is None:
        return tag("section", heading, tag("p", told), tag("p", NO_COMMAND))
    command = tag("pre", tag("code", line, id="command"))
    copy = tag("button", "Copy", id="copy", type="button")
    return tag("section", heading, tag("p", told), tag("div", command, copy, class_="command"))


def _section(title: str, drawings: list[Markup | None], *before: Markup) -> Markup:
    drawn = [drawing for drawing in drawings if drawing]
    if not drawn:
        return Markup("")
    return tag("section", tag("h2", title), *before, tag("div", *drawn, class_="drawings"))


def _left_out(keys: list[str]) -> Markup:
    more = len(keys) - MOST
    return tag("p", f"The first {MOST} parameters; the table has the other {more}.") if more > 0 else Markup("")


def _legend(marks: list[Mark], keys: list[str], names: dict[str, str]) -> Markup:
    """What the colours mean."""
    if len(marks) <= FEW:
        entries = [_entry(mark, keys, names) for mark in marks]
    elif marks[0].best:
        low, high, beyond = shaded([mark.job for mark in marks])
        bar = tag("span", *(tag("i", class_=f"swatch c{shade}") for shade in range(SHADES)), class_="bar")
        highest = f" {fixed(high, '.3f')}{' or more' if beyond else ''}"
        entries = [tag("span", f"final validation loss {fixed(low, '.3f')} ", bar, highest)]
    else:
        entries = []
    if any(mark.job.objective is None for mark in marks):
        entries.append(tag("span", "dashed, hollow: not complete, the last validation loss"))
    return tag("p", *entries, class_="legend")


def _entry(mark: Mark, keys: list[str], names: dict[str, str]) -> Markup:
    swatch = tag("i", class_=f"swatch {mark.colour}")
    return tag("span", swatch, f" {described(mark, keys[:4], names)}", class_="job", data_job=mark.number)


def described(mark: Mark, keys: list[str], names: dict[str, str]) -> str:
    """The job in few words: its number and its parameters."""
    words = [f"{names[key]} {shown(mark.job.config[key])}" for key in keys if key in mark.job.config]
    return f"#{mark.number} {', '.join(words) or mark.job.name}"


def _table(marks: list[Mark], keys: list[str], names: dict[str, str]) -> Markup:
    last = ["step", "tokens/s", "faults", "time", "directory"]
    titles = ["#", "validation loss", "status", *(names[key] for key in keys), *last]
    full = dict(zip(titles[3:], keys, strict=False))
    numbers = {"validation loss", *last[:-1]}
    numbers |= {names[key] for key in keys if any(is_number(mark.job.config.get(key)) for mark in marks)}
    heads = [_head(title, full.get(title), title in numbers) for title in titles]
    rows = [_row(mark, keys, names) for mark in marks]
    body = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return tag("section", tag("h2", "Jobs"), tag("div", body, class_="wide"))


def _head(title: str, hint: str | None, numbers: bool) -> Markup:
    button = tag("button", cut_inside(title, LONGEST_NAME), type="button", title=hint)
    return tag("th", button, scope="col", class_="number" if numbers else None)


def _row(mark: Mark, keys: list[str], names: dict[str, str]) -> Markup:
    job = mark.job
    sorted_by: list[Value] = [
        *(job.val_loss, None),
        *(job.config.get(key) for key in keys),
        *(job.step, job.tokens_per_s, job.faults, number(job.result.get("wall_seconds"))),
    ]
    first = tag("td", tag("i", class_=f"swatch {mark.colour}"), f" {mark.number}", data_value=mark.number)
    columns = [_cell(shown, value) for shown, value in zip(cells(job, keys), sorted_by, strict=True)]
    loss = "" if job.val_loss is None else f", validation loss {brief(job.val_loss)}"
    tip = f"{described(mark, keys[:MOST], names)}{loss} ({job.status})"
    last = tag("td", cut_inside(job.name, LONGEST_NAME), class_="name", title=job.name)
    return tag("tr", first, *columns, last, class_=mark.classes("job"), data_job=mark.number, data_tip=tip)


def _cell(content: str, value: Value) -> Markup:
    if is_number(value) and value is not None:
        return tag("td", content, data_value=repr(float(value)), class_="number")
    return tag("td", content, class_="number" if content == "-" else None)


def _notes(jobs: list[Job]) -> Markup:
    notes = [tag("li", note) for job in jobs for note in job.notes]
    return tag("section", tag("h2", "Notes"), tag("ul", *notes)) if notes else Markup("")
