"""The table of a sweep as text: a row for each job, or for each group of replicates."""

from mingpt_ddp.errors import counted, printable
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.results.formats import cut, duration, fixed, short_names, shown
from mingpt_ddp.results.front import Front, Goal
from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.intervals import Estimate
from mingpt_ddp.results.laws import power_law_lines
from mingpt_ddp.results.objective import LOSS
from mingpt_ddp.results.results import Results
from mingpt_ddp.results.runs import Job, command_line, number, why_no_best

COLUMNS = 8  # for parameters; the page has all


def table(results: Results, is_run: bool) -> str:
    """Return a line per job or group, best first, and the command line of the best.

    Args:
        is_run: the user has named this one run, which is compared with nothing.
    """
    keys = results.keys
    head = ["", *head_of(results, keys[:COLUMNS], short=True), "job"]
    rows = [head]
    starred = [] if is_run else _starred(results)
    for index, group in enumerate(results.groups):
        star = "*" if index in starred else ""
        rows.append([star, *cells_of(results, index, keys[:COLUMNS]), cut(group.name)])
    lines = table_lines(rows, left=(head.index("status"), len(head) - 1))
    if len(keys) > COLUMNS:
        lines.append(f"and {len(keys) - COLUMNS} more parameters: {', '.join(keys[COLUMNS:])}")
    if results.importance:
        lines.append(importance_line(results.importance))
    lines += power_law_lines(results.laws)
    if results.front:
        lines.append(front_line(results.front))
    lines += [f"note: {note}" for note in results.notes]
    for job in results.jobs:
        lines += [f"note: {note}" for note in job.notes]
    best = results.best
    if not is_run:
        lines.append(_best_line(results, best))
    lines = [line.replace("\n", "\\n") for line in lines]
    if best:
        lines.append(command_line(best.first))
    return printable("\n".join(lines))


def _starred(results: Results) -> list[int]:
    """Return the indices of the rows with a star: the best one, or the Pareto front."""
    if results.front:
        return results.front.members
    return [0] if results.best else []


def _best_line(results: Results, best: Group | None) -> str:
    if best is None:
        return why_no_best(results.jobs)
    if not results.has_replicates:
        return f"best: {best.first.directory}"
    mean = f"{with_interval(best.estimate)}, mean of {count_seeds(best)}"
    return f"best: {mean}; its best seed is {best.first.directory}"


def count_seeds(group: Group) -> str:
    """Return how many seeds the mean of a group has, in words."""
    return counted(group.estimate.n if group.estimate else 0, "seed")


def head_of(results: Results, keys: list[str], short: bool) -> list[str]:
    """Return the titles of the cells that `cells_of` formats.

    Args:
        short: as narrow as in a terminal.
    """
    objective = results.objective
    titles = [objective.column if short else objective.title]
    if results.has_replicates:
        titles += ["± 95%", "sd", "n"]
    titles.append("status")
    names = short_names(results.keys)
    titles += [cut(names[key]) for key in keys]
    titles += ["step", f"{results.jobs[0].unit}/s", "faults"]
    titles.append("total time" if results.has_replicates else "time")
    if objective is not LOSS:
        titles.append(LOSS.column if short else LOSS.title)
    if results.front:
        titles += [cut(goal.name) for goal in _further_goals(results)]
    return titles


def cells_of(results: Results, index: int, keys: list[str]) -> list[str]:
    """Format a row: of a group of replicates, or of a job if there are none."""
    group = results.groups[index]
    cells = group_cells(group, keys) if results.has_replicates else job_cells(group.first, keys)
    if results.front:
        values = dict(zip(results.front.goals, results.front.values[index], strict=True))
        cells += [fixed(values[goal], ".6g") for goal in _further_goals(results)]
    return cells


def _further_goals(results: Results) -> list[Goal]:
    """List the objectives of a search that are not what the jobs are ranked by."""
    goals = results.front.goals if results.front else []
    return [goal for goal in goals if goal.name != results.objective.series]


def job_cells(job: Job, keys: list[str]) -> list[str]:
    """Format objective, status, parameters, step, speed, faults and time of a job.

    The loss follows if it is not the objective.
    """
    found = [_value(job), shown(job.status), *_parameters(job, keys)]
    found += [fixed(job.step, "d"), fixed(job.speed, ",.0f"), fixed(job.faults, "d")]
    found.append(duration(number(job.result.get("wall_seconds"))) or "-")
    if job.ranked_by is not LOSS:
        found.append(fixed(job.val_loss, ".4f"))
    return found


def group_cells(group: Group, keys: list[str]) -> list[str]:
    """Format the mean objective of a group, its interval, deviation and number of seeds.

    The cells of a job follow: steps, the median speed, faults and times of all jobs added up.
    """
    latest = group.latest
    found = [_value(group)]
    found.append(fixed(latest.half_width if latest else None, ".4f"))
    found.append(fixed(latest.deviation if latest else None, ".4f"))
    found += [_count(group), shown(group.status), *_parameters(group, keys)]
    found += [_steps(group), fixed(group.speed, ",.0f"), fixed(group.faults, "d")]
    found.append(duration(group.seconds) or "-")
    if group.ranked_by is not LOSS:
        losses = group.estimate_of(lambda job: job.val_loss)
        found.append(fixed(losses.mean if losses else None, ".4f"))
    return found


def _value(measured: Job | Group) -> str:
    """Format the objective; in parentheses if it is that of an incomplete job."""
    value = fixed(measured.value, ".4f")
    is_last = measured.value is not None and measured.objective is None
    return f"({value})" if is_last else value


def _parameters(measured: Job | Group, keys: list[str]) -> list[str]:
    config = measured.config
    return [shown(config[key]) if key in config else "-" for key in keys]


def _count(group: Group) -> str:
    """Format the number of seeds, as 2/3 if only two are complete."""
    total = group.seeds
    return f"{total}" if group.complete == total else f"{group.complete}/{total}"


def _steps(group: Group) -> str:
    steps = [job.step for job in group.jobs if job.step is not None]
    if not steps:
        return "-"
    low, high = fixed(min(steps), "d"), fixed(max(steps), "d")
    return low if low == high else f"{low}-{high}"


def with_interval(found: Estimate | None) -> str:
    """Format a mean as `2.1000 ± 0.0500`; alone if there is no interval."""
    if found is None:
        return "-"
    mean = fixed(found.mean, ".4f")
    return mean if found.half_width is None else f"{mean} ± {fixed(found.half_width, '.4f')}"


def importance_line(importance: dict[str, float]) -> str:
    """Return the share of each parameter in one line."""
    names = short_names([*importance])
    shares = [f"{cut(names[key])} {share:.2f}" for key, share in importance.items()]
    return f"importance (PED-ANOVA): {', '.join(shares[:COLUMNS])}"


def front_line(front: Front) -> str:
    """Say which rows are on the Pareto front, and of what."""
    goals = ", ".join(f"{goal.direction} {cut(goal.name)}" for goal in front.goals)
    if len(front.goals) == 1:
        return f"the best of this search, marked *: {goals}"
    return f"Pareto front, marked *: {len(front.members)} of {len(front.values)}; {goals}"
