"""Word the verdict on several settings: which is better, by how much, and how sure that is."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import RunError, counted, printable
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.study.results.analysis.compare import (
    MORE_SEEDS,
    Comparison,
    SequentialVerdict,
    Setting,
    compare,
    pairs_of,
    settings_of,
)
from mingpt_ddp.study.results.experiments import record, root_of
from mingpt_ddp.study.results.formats import compare_command, format_number
from mingpt_ddp.study.results.groups import Group, best_group, replicates
from mingpt_ddp.study.results.notes import (
    comparison_notes,
    diverged_notes,
    minutes_notes,
    pooling_notes,
)
from mingpt_ddp.study.results.objective import LOSS, is_text
from mingpt_ddp.study.results.runs import RunRecord, by_objective, read_jobs
from mingpt_ddp.study.results.stats.sequential import Decision
from mingpt_ddp.study.results.stats.significance import PAIRED, SEQUENTIAL, Difference

MAX_DECIMALS = 8


def verdict(
    directories: list[Path], as_json: bool, metric: str | None = None, accept_code: bool = False
) -> str:
    """Compare the settings in these directories, record the verdict, and return it.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        as_json: Return JSON instead of text.
        metric: The objective (see `read_jobs`).
        accept_code: Group results together even if the user's code has changed between them.

    Raises:
        RunError: A directory holds no run, no run has the metric, or there is only one setting.
    """
    jobs = read_jobs(directories, metric, accept_code)
    groups = replicates(jobs)
    settings = settings_of(groups, directories)
    if len(settings) < 2:
        raise RunError(
            "there is only one setting, so nothing to compare; name runs that differ in more than "
            "run.seed"
        )
    comparisons = compare(settings)
    pairs = _tests(settings, comparisons)
    notes = comparison_notes(jobs) + notes_on(settings, comparisons, pairs)
    document = to_numbers(jobs, settings, comparisons, notes, pairs)
    if comparisons:
        record(root_of(jobs[0]), {"runs": [*map(str, directories)], **document})
    if as_json:
        return json.dumps(document, indent=1, allow_nan=False)
    if not comparisons:
        notes = [f"note: {note}" for note in _diverged(settings)]
        return printable("\n".join([*notes, _no_verdict(settings)]))
    return to_text(jobs, settings, notes, map(sentence, comparisons))


def to_text(
    jobs: list[RunRecord], settings: list[Setting], notes: list[str], conclusions: Iterable[str]
) -> str:
    """Format a comparison as text: the table of settings, notes, and verdicts.

    Args:
        conclusions: One sentence for each verdict.
    """
    lines = [f"compared by {_objective(jobs)}", *_table(settings)]
    lines += [f"note: {note}" for note in notes]
    lines += conclusions
    return printable("\n".join(line.replace("\n", "\\n") for line in lines))


def sentences(groups: list[Group], directories: list[Path], max_verdicts: int) -> list[str]:
    """Compare the best setting with each other setting. Return the verdicts as sentences.

    Args:
        groups: Groups as `replicates` returns them.
        directories: Directories from the command line.
        max_verdicts: Largest number of verdicts to return. If there are more, a last line has the
            command that shows all of them.

    Returns:
        An empty list if there is only one setting.
    """
    settings = settings_of(groups, directories)
    if len(settings) < 2:
        return []
    comparisons = compare(settings)
    if not comparisons:
        return [_no_verdict(settings)]
    conclusions = [sentence(comparison) for comparison in comparisons[:max_verdicts]]
    if len(comparisons) > max_verdicts:
        command = compare_command(directories, groups[0].ranked_by)
        conclusions.append(
            f"`{command}` shows {counted(len(comparisons) - max_verdicts, 'more comparison')}"
        )
    return [
        *_order_notes(settings, comparisons),
        *conclusions,
        *_correction(comparisons, _tests(settings, comparisons)),
    ]


def _no_verdict(settings: list[Setting]) -> str:
    """Explain why nothing can be said about settings without replicates, and what to do."""
    if all(setting.n_complete == 1 and not setting.diverged for setting in settings):
        why = "each setting has one seed, which says nothing about chance"
    else:
        why = "every setting has fewer than two complete seeds"
        if any(setting.diverged for setting in settings):
            why += ", or a diverged seed"
    return f"nothing can be said: {why}; {MORE_SEEDS}"


def sentence(comparison: Comparison) -> str:
    """Word the verdict of a comparison as a sentence."""
    if comparison.sequential is not None:
        return _sequential_sentence(comparison, comparison.sequential)
    difference = comparison.difference
    if difference is None:
        names = f"{comparison.other.label} against {comparison.reference.label}"
        return f"nothing can be said of {names}: {comparison.why}"
    first, second = comparison.in_order
    if first is not comparison.reference:
        difference = difference.reversed
    amount = _amount(difference, comparison.p)
    if comparison.better:
        return f"{first.label} is better than {second.label} by {amount}"
    return f"no difference shown between {first.label} and {second.label}: {amount}"


def _sequential_sentence(comparison: Comparison, verdict: SequentialVerdict) -> str:
    """Word the verdict of a comparison with until=decided as a sentence."""
    first, second = comparison.in_order
    difference = comparison.difference
    amount = f"{verdict.n_pairs} of {verdict.n_planned} pairs of seeds"
    if difference is not None:
        if first is not comparison.reference:
            difference = difference.reversed
        amount = _amount(difference, comparison.p)
    if verdict.decision is Decision.DIFFERENT:
        return f"{first.label} is better than {second.label} by {amount}"
    if verdict.decision is Decision.NEGLIGIBLE:
        names = f"the difference between {first.label} and {second.label}"
        return f"{names} is smaller than {verdict.smallest_relevant:g}: {amount}"
    why = f"{comparison.why}; " if comparison.why else ""
    return f"not decided between {first.label} and {second.label}: {why}{amount}"


def _amount(difference: Difference, p: float) -> str:
    """Format as `0.314 ± 0.052 (95% interval 0.262 to 0.366, 3 paired seeds, p = 0.002)`."""
    half = (difference.high - difference.low) / 2
    decimals = min(max(1 - math.floor(math.log10(half)), 0), MAX_DECIMALS)
    mean, half_width, low, high = (
        format_number(value, f".{decimals}f")
        for value in (difference.difference, half, difference.low, difference.high)
    )
    n_first, n_second = difference.seeds
    seeds = f"{n_first} and {n_second} seeds"
    if difference.test in (PAIRED, SEQUENTIAL):
        seeds = f"{n_first} paired seeds"
    if difference.test == SEQUENTIAL:
        seeds = f"sequential test after {seeds}"
    if difference.left_out:
        seeds += f", {counted(difference.left_out, 'unpaired seed')} left out"
    chance = f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"
    return f"{mean} ± {half_width} (95% interval {low} to {high}, {seeds}, {chance})"


def _objective(jobs: list[RunRecord]) -> str:
    """Describe the number by which jobs are compared."""
    objective = jobs[0].ranked_by
    if objective is LOSS and all(is_text(job.config) for job in jobs):
        return f"{objective.title}, in nats per token"
    return f"{objective.title}: {objective.note}" if objective.note else objective.title


def notes_on(settings: list[Setting], comparisons: list[Comparison], pairs: int) -> list[str]:
    """Collect notes on a comparison: grouped and unfinished jobs, the order, corrections of p."""
    jobs = [job for setting in settings for job in setting.jobs]
    notes = minutes_notes(settings) + pooling_notes(replicates(jobs))
    for job in jobs:
        notes += job.notes
    for setting in settings:
        if setting.n_unfinished:
            jobs_left_out = counted(setting.n_unfinished, "job")
            notes.append(
                f"jobs that are not complete do not count: {jobs_left_out} of {setting.label}"
            )
    return (
        notes
        + _diverged(settings)
        + _order_notes(settings, comparisons)
        + _correction(comparisons, pairs)
    )


def _diverged(settings: list[Setting]) -> list[str]:
    return diverged_notes((setting.label, setting) for setting in settings)


def _order_notes(settings: list[Setting], comparisons: list[Comparison]) -> list[str]:
    """Explain each verdict that contradicts the order of the table or the best setting."""
    notes = []
    best = best_group(settings)
    for comparison in comparisons:
        first, second = comparison.in_order
        test = comparison.difference
        if test and comparison.better and by_objective(second) < by_objective(first):
            left_out = counted(test.left_out, "seed")
            notes.append(
                f"{second.label} has the better mean over all of its seeds, but {first.label} is "
                f"better at the {test.seeds[0]} seeds that both have: {left_out} left out"
            )
        elif comparison.better and second is best:
            notes.append(
                f"{second.label} is the best over the seeds that all settings have, but "
                f"{first.label} is better than it over more seeds"
            )
    return notes


def _tests(settings: list[Setting], comparisons: list[Comparison]) -> int:
    """Return the number of tests that the p-values are corrected for."""
    if comparisons and (first := comparisons[0].sequential):
        return first.n_comparisons
    return pairs_of(settings)


def _correction(comparisons: list[Comparison], pairs: int) -> list[str]:
    """Explain how the p-values of several comparisons are corrected."""
    if comparisons and comparisons[0].sequential:
        text = "until=decided: the test is sequential, so it is valid to stop once it is decided"
        if pairs > 1:
            text += (
                f"; p and intervals are corrected for {pairs} comparisons with the first setting"
            )
        return [text]
    if pairs < 2:
        return []
    return [
        f"p is corrected for all {pairs} pairs of settings (Holm), but the intervals are not "
        "corrected"
    ]


def _table(settings: list[Setting]) -> list[str]:
    """Format the table of settings as lines."""
    minutes = [format_number(setting.minutes, ".3g") for setting in settings]
    has_minutes = any(setting.minutes is not None for setting in settings)
    time = ["minutes"] if has_minutes else []
    rows = [["mean", "seeds", "deviation", "95% interval", *time, "setting"]]
    for setting, taken in zip(settings, minutes, strict=True):
        estimate = setting.estimate
        numbers = (estimate.mean, estimate.deviation, estimate.low, estimate.high)
        mean, deviation, low, high = (format_number(value, ".4f") for value in numbers)
        interval = "-" if estimate.low is None else f"{low} to {high}"
        time = [taken] if has_minutes else []
        rows.append([mean, setting.seed_count, deviation, interval, *time, setting.label])
    return table_lines(rows, left=(len(rows[0]) - 1,))


def to_numbers(
    jobs: list[RunRecord],
    settings: list[Setting],
    comparisons: list[Comparison],
    notes: list[str],
    pairs: int,
) -> dict[str, Any]:
    """Convert a comparison to JSON values."""
    listed = []
    for setting in settings:
        codes = sorted({job.code for job in setting.jobs if job.code})
        more: dict[str, Any] = {"by_seed": setting.by_seed, "diverged": setting.diverged}
        more |= {"unfinished": setting.n_unfinished, "codes": codes, "minutes": setting.minutes}
        listed.append({"name": setting.label, **asdict(setting.estimate), **more})
    best = best_group(settings) if comparisons else None
    # The best setting over the shared seeds may be worse over more seeds. Then none is the best.
    if any(each.worse is best for each in comparisons):
        best = None
    return {
        "objective": jobs[0].ranked_by.key,
        "better": jobs[0].ranked_by.better,
        "best": best.label if best else None,
        "settings": listed,
        "comparisons": [_comparison_numbers(comparison) for comparison in comparisons],
        "pairs_corrected_for": pairs,
        "notes": notes if comparisons else [*notes, _no_verdict(settings)],
    }


def _comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    better = comparison.better
    numbers: dict[str, Any] = {
        "reference": comparison.reference.label,
        "other": comparison.other.label,
        "better": better.label if better else None,
        "sentence": sentence(comparison),
    }
    if comparison.sequential:
        verdict = comparison.sequential
        numbers |= {"decision": verdict.decision.value, "pairs": verdict.n_pairs}
        numbers["planned_pairs"] = verdict.n_planned
    if comparison.difference:
        numbers |= {**asdict(comparison.difference), "p_corrected": comparison.p}
    return numbers
