"""What a page has of one run alone: timings of its ranks, samples, what restarts changed."""

import re
import statistics
from html import escape
from pathlib import Path

from mingpt_ddp.metrics.sinks.event_files import RankEvents, read_events
from mingpt_ddp.results.elements import grid, table
from mingpt_ddp.results.formats import cut, fixed, when
from mingpt_ddp.results.page.figures import SERIES, Mark, label, mean_curve
from mingpt_ddp.results.page.plots import Plots, legend_of
from mingpt_ddp.results.runs import Job, number
from mingpt_ddp.storage.storage import read_tail

SAMPLES = 12
LONGEST_SAMPLE = 2000  # characters
LOG_BYTES = 1 << 22  # that are read, from the end of rank zero's log
LOG_LINES = 100  # that are shown, of these
TIMINGS = {  # plot and column titles, by tag
    "speed/step_ms": "step, ms",
    "speed/data_ms": "fetching the batch, ms",
    "speed/communication_ms": "communication, ms",
    "speed/communication_exposed_ms": "communication not hidden, ms",
    "memory/peak_mib": "peak memory, MiB",
}
# Lines of the log that say what a restart changed, and all warnings and errors.
EVENT = re.compile(r"\S+ \S+ (WARNING|ERROR|INFO (resuming from|changed from|the code differs))")


def read_ranks(directory: Path) -> tuple[dict[str, RankEvents], list[str]]:
    """Return what each rank has logged to TensorBoard, and notes on what cannot be read."""
    ranks = {}
    notes = []
    for path in sorted(directory.glob("rank*"), key=lambda path: (len(path.name), path.name)):
        try:
            ranks[path.name] = read_events(path)
        except (OSError, ValueError, ImportError) as error:
            notes.append(f"the timings of {path.name} cannot be read: {error}")
    return ranks, notes


def timings(plots: Plots, ranks: dict[str, RankEvents]) -> str:
    """Draw each timing of every rank over the steps, and tabulate the medians; "" for one rank."""
    tags = [tag for tag in TIMINGS if any(tag in events.scalars for events in ranks.values())]
    if len(ranks) < 2 or not tags:
        return ""
    marks = {rank: Mark(colour, label(rank)) for rank, colour in zip(ranks, SERIES, strict=False)}
    figures = ""
    for tag in tags:
        curves = []
        for rank, mark in marks.items():
            curves.append((mark, mean_curve([ranks[rank].scalars.get(tag, {}).items()])))
        figures += plots.series(curves, TIMINGS[tag])
    rows = []
    for rank, events in ranks.items():
        medians = {f"median of {TIMINGS[tag]}": _median(events, tag) for tag in tags}
        rows.append({"rank": rank, **medians})
    return f"<p>{legend_of([*marks.values()])}</p>{grid(figures)}{table(rows)}"


def _median(events: RankEvents, tag: str) -> str:
    values = [value for value in events.scalars.get(tag, {}).values() if number(value) is not None]
    return fixed(statistics.median(values), ".2f") if values else "-"


def samples(ranks: dict[str, RankEvents]) -> str:
    """Show texts that the model has generated, evenly over the run, the last one among them."""
    texts = ranks["rank0"].texts.get("sample", {}) if "rank0" in ranks else {}
    steps = sorted(texts, reverse=True)
    blocks = []
    for step in steps[:: len(steps) // SAMPLES + 1]:
        # TensorBoard's are indented
        text = "\n".join(line.removeprefix("    ") for line in texts[step].splitlines())
        blocks.append(f"<p>step {step}</p><pre>{escape(text[:LONGEST_SAMPLE])}</pre>")
    return "".join(blocks)


def restarts(job: Job) -> str:
    """List the starts, and what the log says of restarts, warnings and errors."""
    rows = []
    for index, record in enumerate(job.history.attempts, start=1):
        row = {"attempt": str(index), "began": when(number(record.get("start")))}
        row["after step"] = fixed(number(record.get("step")), ".0f")
        row["ranks"] = fixed(number(record.get("world_size")), ".0f")
        rows.append(row)
    html = table(rows) if len(rows) > 1 else ""
    if lines := "\n".join(_log_events(job.directory / "main.rank0.log")):
        html += f"<p>From the log:</p><pre>{escape(lines)}</pre>"
    return html


def _log_events(path: Path) -> list[str]:
    """Return the last lines of a log that say what a restart changed, or warn."""
    try:
        text = read_tail(path, LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    entries = re.split(r"\n(?=\d{4}-)", text.strip())  # a table has several lines
    return [cut(entry, 400) for entry in entries if EVENT.match(entry)][-LOG_LINES:]
