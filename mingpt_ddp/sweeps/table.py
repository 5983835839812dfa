"""The table of a sweep's jobs, as text for a terminal."""

from __future__ import annotations

from datetime import timedelta

from mingpt_ddp.errors import printable
from mingpt_ddp.sweeps.command import NO_COMMAND, command_line
from mingpt_ddp.sweeps.runs import Job, best_of
from mingpt_ddp.sweeps.values import LONGEST, cut_inside, fixed, number, short_names, shown

MOST = 8  # parameters that have a column; the page has them all


def table(jobs: list[Job], keys: list[str]) -> str:
    """One line for each job, the best first, and the command line of that.

    Args:
        keys: the parameters in which the jobs differ.
    """
    names = short_names(keys)
    columns = [cut_inside(names[key], LONGEST) for key in keys[:MOST]]
    head = ["", "val loss", "status", *columns, "step", "tokens/s", "faults", "time", "job"]
    best = best_of(jobs)
    rows = [["*" if job is best else "", *cells(job, keys[:MOST]), job.name] for job in jobs]
    lines = _aligned([head, *rows])
    if len(keys) > MOST:
        lines.append(f"and {len(keys) - MOST} more parameters: {', '.join(keys[MOST:])}")
    lines += [f"note: {note}" for job in jobs for note in job.notes]
    lines.append("no job is complete" if best is None else f"best: {best.directory}")
    lines = [line.replace("\n", "\\n") for line in lines]
    if best:
        lines.append(command_line(best) or NO_COMMAND)
    return printable("\n".join(lines))


def cells(job: Job, keys: list[str]) -> list[str]:
    """Loss, status, parameters, step, tokens per second, faults, time."""
    loss = "-" if job.val_loss is None else fixed(job.val_loss, ".4f")
    seconds = number(job.result.get("wall_seconds"))
    return [
        loss if job.objective is not None or job.val_loss is None else f"({loss})",
        shown(job.status),
        *(shown(job.config[key]) if key in job.config else "-" for key in keys),
        "-" if job.step is None else fixed(job.step, "d"),
        "-" if job.tokens_per_s is None else fixed(job.tokens_per_s, ",.0f"),
        "-" if job.faults is None else f"{job.faults}",
        "-" if seconds is None or not 0 <= seconds < 1e13 else str(timedelta(seconds=round(seconds))),
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns to the right where the table has numbers; the last one is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    left = {0, 2}
    return [
        "  ".join(
            [*(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))), row[-1]]  # noqa: B905
        ).rstrip()
        for row in rows
    ]
