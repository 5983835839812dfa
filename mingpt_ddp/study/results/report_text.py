"""Write the report of a sweep as text: a row for each job, or for each group of replicates."""

from mingpt_ddp.errors import counted, printable
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.study.results.formats import (
    command_line,
    compare_command,
    cut,
    duration,
    format_number,
    format_value,
    short_names,
    words,
)
from mingpt_ddp.study.results.groups import Group
from mingpt_ddp.study.results.objective import LOSS
from mingpt_ddp.study.results.results import Results
from mingpt_ddp.study.results.runs import known, why_no_best
from mingpt_ddp.study.results.stats.intervals import Estimate

MAX_PARAMETERS = 8  # number of parameters that the table shows; the page shows all
Cells = dict[str, str]  # the cells of a row by title of their column; all rows have the same titles


def table(results: Results, is_run: bool) -> str:
    """Return a line for each job or group, best first, then notes and the command of the best job.

    Args:
        is_run: True if the user has named one run, so that there is nothing to compare.
    """
    keys = results.keys
    best = results.best
    rows = []
    for group in results.groups:
        star = "*" if group is best and not is_run else ""
        cells = cells_of(results, group, keys[:MAX_PARAMETERS], short=True)
        rows.append({"": star, **cells, "job": cut(group.name)})
    head, body = used_columns(rows)
    lines = table_lines([head, *body], left=(head.index("status"), len(head) - 1))
    if len(keys) > MAX_PARAMETERS:
        lines.append(
            f"and {len(keys) - MAX_PARAMETERS} more parameters: {', '.join(keys[MAX_PARAMETERS:])}"
        )
    lines += [f"note: {note}" for note in [*results.notes, *results.unread]]
    if not is_run:
        lines += _best_lines(results, best)
    lines = [line.replace("\n", "\\n") for line in lines]
    if best:
        lines.append(command_line(best.first))
    return printable("\n".join(lines))


def _best_lines(results: Results, best: Group | None) -> list[str]:
    """Name the best job or group. Explain if there is none."""
    if best is None:
        return [why_no_best(results.jobs)]
    if not results.has_replicates:
        return [f"best: {best.first.directory}"]
    mean = f"{with_interval(best.estimate)}, mean of {counted(best.n_complete, 'seed')}"
    lines = [f"best: {mean}; its best seed is {best.first.directory}"]
    if len(results.groups) > 1:
        lines.append(
            f"`{compare_command(results.directories, results.objective)}` tests whether other "
            "settings differ from it"
        )
    return lines


def cells_of(results: Results, group: Group, keys: list[str], *, short: bool) -> Cells:
    """Format the row of a group. Return its cells by the title of their column.

    With replicates, the row has the mean objective with its interval, deviation and number of
    seeds, the median speed, and the sums of the faults and times of all jobs.

    Args:
        keys: The parameters to show.
        short: Use narrow titles for a terminal, and keys of parameters instead of words.
    """
    objective = results.objective
    names = short_names(results.keys)
    in_words = str if short else words
    cells = {objective.column if short else objective.title: _value(group)}
    time = "time"
    if results.has_replicates:
        cells["± 95%"] = format_number(group.latest.half_width, ".4f")
        cells["sd"] = format_number(group.latest.deviation, ".4f")
        cells["n"] = group.seed_count
        time = "total time"
    cells["status"] = format_value(group.status)
    for key in keys:
        title = cut(in_words(names[key]))
        cell = format_value(group.config[key]) if key in group.config else "-"
        cells[key if title in cells else title] = cell
    cells["step"] = _steps(group)
    cells[f"{results.jobs[0].unit}/s"] = format_number(group.speed, ",.0f")
    cells["minutes"] = format_number(group.minutes, ".3g")
    cells["faults"] = format_number(group.faults, "d")
    cells[time] = duration(group.seconds) or "-"
    if objective is not LOSS:
        loss = group.estimate_of(lambda job: job.val_loss).mean
        cells[LOSS.column if short else LOSS.title] = format_number(loss, ".4f")
    return cells


def _value(group: Group) -> str:
    """Format the objective of a group. A last value is in parentheses if no job is complete."""
    value = format_number(group.value, ".4f")
    is_last = group.value is not None and group.objective is None
    return f"({value})" if is_last else value


def _steps(group: Group) -> str:
    """Format the last steps of the jobs, such as `100` or `80-100`."""
    steps = known(job.step for job in group.jobs)
    if not steps:
        return "-"
    low, high = format_number(min(steps), "d"), format_number(max(steps), "d")
    return low if low == high else f"{low}-{high}"


def with_interval(estimate: Estimate) -> str:
    """Format a mean as `2.1000 ± 0.0500`, or as `2.1000` if it has no interval."""
    mean = format_number(estimate.mean, ".4f")
    return (
        mean
        if estimate.half_width is None
        else f"{mean} ± {format_number(estimate.half_width, '.4f')}"
    )


def used_columns(rows: list[Cells]) -> tuple[list[str], list[list[str]]]:
    """Drop columns that are empty in all rows. Return the other titles and their cells."""
    titles = []
    for title in rows[0] if rows else ():
        if any(row[title] not in ("", "-") for row in rows):
            titles.append(title)
    return titles, [[row[title] for title in titles] for row in rows]
