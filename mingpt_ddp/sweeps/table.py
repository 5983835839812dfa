"""The table of a sweep's jobs as text, and its number formats."""

import json
from datetime import timedelta

from mingpt_ddp.errors import printable
from mingpt_ddp.metrics.objective import LOSS
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.sweeps.runs import Job, Value, best_of, command_line, number, why_no_best

COLUMNS = 8  # for parameters; the page has all
LONGEST = 60  # characters of a value or a name


def table(jobs: list[Job], keys: list[str], notes: list[str], is_run: bool) -> str:
    """Return a line per job, best first, and the command line of the best.

    Args:
        keys: the parameters in which the jobs differ.
        notes: on the comparison of the jobs.
        is_run: the user has named this one run, which is compared with nothing.
    """
    names = short_names(keys)
    best = best_of(jobs)
    in_table = keys[:COLUMNS]
    objective = jobs[0].ranked_by
    head = ["", objective.column, "status", *(cut(names[key]) for key in in_table)]
    head += ["step", f"{jobs[0].unit}/s", "faults", "time"]
    if objective is not LOSS:
        head.append(LOSS.column)
    head.append("job")
    rows = [head]
    for job in jobs:
        star = "*" if job is best and not is_run else ""
        rows.append([star, *cells(job, in_table), job.name])
    lines = table_lines(rows, left=(head.index("status"), len(head) - 1))
    if len(keys) > COLUMNS:
        lines.append(f"and {len(keys) - COLUMNS} more parameters: {', '.join(keys[COLUMNS:])}")
    for note in notes:
        lines.append(f"note: {note}")
    for job in jobs:
        lines += [f"note: {note}" for note in job.notes]
    if not is_run:
        lines.append(why_no_best(jobs) if best is None else f"best: {best.directory}")
    lines = [line.replace("\n", "\\n") for line in lines]
    if best:
        lines.append(command_line(best))
    return printable("\n".join(lines))


def cells(job: Job, keys: list[str]) -> list[str]:
    """Format objective, status, parameters, step, speed, faults and time of a job.

    The loss follows if it is not the objective.
    """
    value = fixed(job.value, ".4f")
    if job.value is not None and job.objective is None:
        value = f"({value})"
    found = [value, shown(job.status)]
    for key in keys:
        found.append(shown(job.config[key]) if key in job.config else "-")
    found += [fixed(job.step, "d"), fixed(job.speed, ",.0f"), fixed(job.faults, "d")]
    found.append(duration(number(job.result.get("wall_seconds"))) or "-")
    if job.ranked_by is not LOSS:
        found.append(fixed(job.val_loss, ".4f"))
    return found


def duration(seconds: float | None) -> str:
    """Format a time as hours, minutes and seconds; "" if it is unknown or absurd."""
    if seconds is None or not 0 <= seconds < 1e13:
        return ""
    return str(timedelta(seconds=round(seconds)))


def short_names(keys: list[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if the last part is ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    unclear = {"name", "path", *(name for name in last if last.count(name) > 1)}
    return {key: key if name in unclear else name for key, name in zip(keys, last, strict=True)}


def shown(value: Value) -> str:
    """Format a value as on the command line, cut to LONGEST characters."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return brief(value)
    return cut(value if isinstance(value, str) else json.dumps(value))


def brief(value: float) -> str:
    """Format with at most four digits, more for whole numbers; 3e-4 for 0.0003."""
    if abs(value) < 1e9 and value == round(value):
        return f"{value:.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else scientific(value)


def fixed(value: float | None, form: str) -> str:
    """Format a number; `-` for None, with an exponent if it would be too long to read."""
    if value is None:
        return "-"
    return f"{value:{form}}" if abs(value) < 1e12 else scientific(value)


def scientific(value: float) -> str:
    """Format with at most four digits and an exponent."""
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def cut(text: str, longest: int = LONGEST) -> str:
    """Cut the middle out of a text that is too long: similar names often differ at the end."""
    if len(text) <= longest:
        return text
    return f"{text[: (longest - 1) // 2]}…{text[len(text) - longest // 2 :]}"
