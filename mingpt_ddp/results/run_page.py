"""Render the page of one run: curves, timings of every rank, samples, what restarts changed."""

import re
import statistics
import time
from html import escape
from pathlib import Path
from typing import Any

import yaml

from mingpt_ddp.metrics.event_files import RankEvents, read_events
from mingpt_ddp.results.figures import COLOURS, INCOMPLETE, draw, loss_axis, thinned
from mingpt_ddp.results.formats import cut, duration, fixed, shown
from mingpt_ddp.results.page import document, html_grid, html_list, html_table
from mingpt_ddp.results.runs import Job, command_line, number
from mingpt_ddp.storage.storage import read_tail

RANKS = 8  # with a line in the plots; the table has all
MOST_RANKS = 1024  # read
MARKED = 200  # restarts with a line in the plots
OTHER_CURVES = 16
SAMPLES = 12
LONGEST_SAMPLE = 2000  # characters
LOG_BYTES = 1 << 22  # that are read, from the end of rank zero's log
LOG_LINES = 100  # that are shown, of these
RANK_COLOURS = [
    *COLOURS,
    "rgb(46,150,90)",
    "rgb(214,80,70)",
    "rgb(120,110,200)",
    "rgb(20,150,160)",
    INCOMPLETE,
]
TIMINGS = {  # plot and column titles, by tag
    "speed/step_ms": "step, ms",
    "speed/data_ms": "fetching the batch, ms",
    "speed/communication_ms": "communication, ms",
    "speed/communication_exposed_ms": "communication not hidden, ms",
    "memory/peak_mib": "peak memory, MiB",
}
# Lines of the log that say what a restart changed, and all warnings and errors.
EVENT = re.compile(
    r"\S+ \S+ (WARNING|ERROR|INFO (resuming from|results may differ|the configuration d"
    r"|the learning rate of))"
)
WHEN = "%Y-%m-%d %H:%M:%S"
Points = list[tuple[int, float]]


def render_run(title: str, job: Job) -> str:
    """Return the whole document. All names, values and texts are untrusted, as in `render_page`."""
    figures: list[dict[str, Any]] = []
    ranks, unread = _read_ranks(job.directory / "tensorboard")
    marks = _marks(job)
    curves = {
        "training": job.history.series("train_loss"),
        "validation": job.history.series("val_loss"),
    }
    losses = _curves(figures, curves, marks, "loss", 380)
    drawn = [key for key in job.history.columns if key not in ("train_loss", "val_loss")]
    others = ""
    for key in drawn[:OTHER_CURVES]:
        others += _curves(figures, {key: job.history.series(key)}, marks, cut(key, 40))
    sections = {
        "Result": _result(job),
        "Losses": losses and f"<p>{_legend([*curves])} Dotted: a restart.</p>{losses}",
        "Learning rate, speed and metrics": others and html_grid(others),
        "Ranks": _ranks(figures, ranks, marks),
        "Samples": _samples(ranks),
        "Attempts": _attempts(job),
        "Configuration": _configuration(job),
        "Notes": html_list([*job.notes, *unread]),
    }
    faults = job.faults or 0
    total = duration(number(job.result.get("wall_seconds")))
    took = f" in {total}" if total else ""
    summary = f"{shown(job.status)}: {fixed(job.step, 'd')} steps{took}. Faults survived: {faults}."
    return document(title, summary, sections, figures)


def _result(job: Job) -> str:
    rows = []
    for key, found in job.result.items():
        value = number(found)
        if value is not None:
            rows.append([cut(str(key)), fixed(value, ".6g")])
    return html_table(["what", "value"], rows) if rows else ""


def _marks(job: Job) -> dict[str, Any]:
    """Return the layout of a dotted line at each restart."""
    found = [number(record["step"]) for record in job.history.attempts[1:]]
    steps = [*dict.fromkeys(step for step in found if step is not None)]
    line = {"color": INCOMPLETE, "width": 1, "dash": "dot"}
    across = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return {"shapes": [{**across, "x0": step, "x1": step} for step in steps[-MARKED:]]}


def _curves(
    figures: list[dict[str, Any]],
    series: dict[str, Points],
    layout: dict[str, Any],
    title: str,
    height: int = 260,
) -> str:
    """Draw one figure of several series over the steps; their names are ours, the title is not."""
    traces = []
    values = list[float]()
    for (name, points), colour in zip(series.items(), RANK_COLOURS, strict=False):
        steps, drawn = thinned(points)
        if not steps:
            continue
        named = f"{name}, " if len(series) > 1 else ""
        trace = {
            "mode": "lines" if len(steps) > 1 else "markers",
            "x": steps,
            "y": drawn,
            "line": {"color": colour, "width": 1.8},
            "hovertemplate": f"{named}step %{{x}}: %{{y:.5g}}<extra></extra>",
        }
        traces.append(trace)
        values += drawn
    # the ticks stand off, below a label of the other axis at its end
    xaxis = {"title": {"text": "step"}, "ticklabelstandoff": 8}
    yaxis = loss_axis(values, "") if height > 260 else {}
    titled = {**layout, "xaxis": xaxis, "yaxis": yaxis}
    titled["title"] = {"text": escape(title, quote=False)}
    return draw(figures, traces, titled, height)


def _legend(names: list[str]) -> str:
    """Name the colours of the curves."""
    entries = []
    for name, colour in zip(names, RANK_COLOURS, strict=False):
        entries.append(f'<span style="color:{colour}">&#9632;</span>&nbsp;{name}')
    return " ".join(entries)


def _read_ranks(directory: Path) -> tuple[dict[int, RankEvents], list[str]]:
    """Return what each rank has logged to TensorBoard, and notes on what cannot be read."""
    ranks = {}
    notes = []
    found = [path for path in directory.glob("rank*") if re.fullmatch(r"rank\d{1,6}", path.name)]
    for path in sorted(found, key=lambda path: int(path.name[4:]))[:MOST_RANKS]:
        try:
            ranks[int(path.name[4:])] = read_events(path)
        except (OSError, ValueError, ImportError) as error:
            notes.append(f"the timings of {path.name} cannot be read: {error}")
    return ranks, notes


def _ranks(
    figures: list[dict[str, Any]], ranks: dict[int, RankEvents], marks: dict[str, Any]
) -> str:
    """Draw each timing of every rank over the steps, and tabulate the medians."""
    tags = [tag for tag in TIMINGS if any(tag in events.scalars for events in ranks.values())]
    if not tags:
        return ""
    drawn = {f"rank {rank}": ranks[rank] for rank in [*ranks][:RANKS]}
    plots = ""
    for tag in tags:
        series: dict[str, Points] = {}
        for name, events in drawn.items():
            series[name] = sorted(events.scalars.get(tag, {}).items())
        plots += _curves(figures, series, marks, TIMINGS[tag])
    rows = []
    for rank, events in ranks.items():
        rows.append([str(rank), *(_median(events.scalars.get(tag, {})) for tag in tags)])
    table = html_table(["rank", *(f"median of {TIMINGS[tag]}" for tag in tags)], rows)
    return f"<p>{_legend([*drawn])}</p>{html_grid(plots)}{table}"


def _median(points: dict[int, float]) -> str:
    values = [value for value in points.values() if number(value) is not None]
    return fixed(statistics.median(values), ".2f") if values else "-"


def _samples(ranks: dict[int, RankEvents]) -> str:
    """Show texts that the model has generated, evenly over the run, the last one among them."""
    texts: dict[int, str] = {}
    for events in ranks.values():
        texts |= events.texts.get("sample", {})
    steps = sorted(texts, reverse=True)
    chosen = steps[:: len(steps) // SAMPLES + 1]
    blocks = []
    for step in chosen:
        # TensorBoard's are indented
        text = "\n".join(line.removeprefix("    ") for line in texts[step].splitlines())
        blocks.append(f"<p>step {step}</p><pre>{escape(text[:LONGEST_SAMPLE])}</pre>")
    return "".join(blocks)


def _attempts(job: Job) -> str:
    """List the starts, and what the log says of restarts, warnings and errors."""
    rows = []
    for index, record in enumerate(job.history.attempts, start=1):
        step = number(record.get("step"))
        ranks = number(record.get("world_size"))
        rows.append([str(index), _when(record), fixed(step, ".0f"), fixed(ranks, ".0f")])
    lines = "\n".join(_log_events(job.directory / "main.rank0.log"))
    table = html_table(["attempt", "began", "after step", "ranks"], rows) if rows else ""
    return table + (f"<p>From the log:</p><pre>{escape(lines)}</pre>" if lines else "")


def _when(start: dict[str, Any]) -> str:
    """Format when an attempt began."""
    at = number(start.get("start"))
    if at is None:
        return "-"
    try:
        return time.strftime(WHEN, time.localtime(at))
    except (ValueError, OverflowError, OSError):  # no such date
        return "-"


def _log_events(path: Path) -> list[str]:
    """Return the last lines of a log that say what a restart changed, or warn."""
    try:
        lines = read_tail(path, LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [cut(line, 400) for line in lines if EVENT.match(line)][-LOG_LINES:]


def _configuration(job: Job) -> str:
    if not job.config:
        return ""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in job.config.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    text = yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return f"<pre>{escape(command_line(job))}</pre><p></p><pre>{escape(text)}</pre>"
