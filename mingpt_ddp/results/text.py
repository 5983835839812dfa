"""The table of a sweep as text: a row for each job, or for each group of replicates."""

from mingpt_ddp.errors import counted, printable
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.results.analysis.front import Front, Goal
from mingpt_ddp.results.analysis.laws import power_law_lines
from mingpt_ddp.results.elements import Row, used_columns
from mingpt_ddp.results.formats import cut, duration, fixed, short_names, shown, words
from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.objective import LOSS
from mingpt_ddp.results.results import Results
from mingpt_ddp.results.runs import command_line, why_no_best
from mingpt_ddp.results.stats.intervals import Estimate

COLUMNS = 8  # for parameters; the page has all


def table(results: Results, is_run: bool) -> str:
    """Return a line per job or group, best first, and the command line of the best.

    Args:
        is_run: the user has named this one run, which is compared with nothing.
    """
    keys = results.keys
    starred = [] if is_run else _starred(results)
    rows = []
    for index, group in enumerate(results.groups):
        star = "*" if index in starred else ""
        columns = columns_of(results, index, keys[:COLUMNS], short=True)
        rows.append([("", star), *columns, ("job", cut(group.name))])
    head, body = used_columns(rows)
    lines = table_lines([head, *body], left=(head.index("status"), len(head) - 1))
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


def columns_of(results: Results, index: int, keys: list[str], *, short: bool) -> Row:
    """Format a row, as titles and cells: of a group of replicates, or of a job if there are none.

    Of a group with replicates it has the mean objective with its interval, deviation and number of
    seeds, the median speed, and faults and times of all jobs added up.

    Args:
        short: the titles are narrow, as in a terminal, and parameters have their keys.
    """
    group = results.groups[index]
    objective = results.objective
    names = short_names(results.keys)
    found = [(objective.column if short else objective.title, _value(group))]
    if results.has_replicates:
        latest = group.latest
        found.append(("± 95%", fixed(latest.half_width if latest else None, ".4f")))
        found.append(("sd", fixed(latest.deviation if latest else None, ".4f")))
        found.append(("n", _count(group)))
    found.append(("status", shown(group.status)))
    for key in keys:
        title = cut(names[key] if short else words(names[key]))
        found.append((title, shown(group.config[key]) if key in group.config else "-"))
    found.append(("step", _steps(group)))
    found.append((f"{results.jobs[0].unit}/s", fixed(group.speed, ",.0f")))
    found.append(("faults", fixed(group.faults, "d")))
    time = "total time" if results.has_replicates else "time"
    found.append((time, duration(group.seconds) or "-"))
    if objective is not LOSS:
        losses = group.estimate_of(lambda job: job.val_loss)
        title = LOSS.column if short else LOSS.title
        found.append((title, fixed(losses.mean if losses else None, ".4f")))
    if results.front:
        values = dict(zip(results.front.goals, results.front.values[index], strict=True))
        for goal in _further_goals(results):
            title = cut(goal.name if short else words(goal.name))
            found.append((title, fixed(values[goal], ".6g")))
    return found


def _further_goals(results: Results) -> list[Goal]:
    """List the objectives of a search that are not what the jobs are ranked by."""
    goals = results.front.goals if results.front else []
    return [goal for goal in goals if goal.name != results.objective.series]


def _value(group: Group) -> str:
    """Format the objective; in parentheses if it is that of incomplete jobs."""
    value = fixed(group.value, ".4f")
    is_last = group.value is not None and group.objective is None
    return f"({value})" if is_last else value


def _count(group: Group) -> str:
    """Format the number of seeds, as 2/3 if only two are complete, and that of several codes."""
    total = group.seeds
    count = f"{total}" if group.complete == total else f"{group.complete}/{total}"
    return f"{count} ({group.codes} codes)" if group.codes > 1 else count


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
