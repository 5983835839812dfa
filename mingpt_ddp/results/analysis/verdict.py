"""Say which of several settings is better, by how much, and how sure that is: text and numbers."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mingpt_ddp.distributed.exit import echo_error
from mingpt_ddp.errors import RunError, counted, printable
from mingpt_ddp.metrics.text_table import table_lines
from mingpt_ddp.results.analysis.compare import (
    MORE_SEEDS,
    Comparison,
    Setting,
    compare,
    pairs_of,
    settings_of,
)
from mingpt_ddp.results.experiments import append, root_of
from mingpt_ddp.results.formats import fixed
from mingpt_ddp.results.groups import Group, replicates
from mingpt_ddp.results.notes import comparison_notes, pooling_notes
from mingpt_ddp.results.objective import LOSS, is_text
from mingpt_ddp.results.runs import Job, by_objective, compare_command, read_jobs
from mingpt_ddp.results.stats.significance import PAIRED, Difference

MOST_DECIMALS = 8


def verdict(directories: list[Path], as_json: bool, by_code: bool = False) -> str:
    """Return which settings are better than others, as text or as JSON, and record it.

    Args:
        directories: runs, or parents of runs one or two levels below.
        by_code: as for `settings_of`.

    Raises:
        RunError: a directory holds no run, or there is one setting only.
    """
    jobs = read_jobs(directories)
    groups = replicates(jobs)
    settings = settings_of(groups, directories, by_code)
    if len(settings) < 2:
        raise RunError(
            "there is one setting to compare; name runs that differ in more than run.seed"
            + (", or write by=code" if groups[0].codes > 1 and not by_code else "")
        )
    comparisons = compare(settings)
    pairs = pairs_of(settings)
    notes = notes_on(jobs, settings, pairs, [] if by_code else directories)
    document = to_numbers(jobs, settings, comparisons, notes, pairs)
    if comparisons:
        experiment = {"runs": [*map(str, directories)], **document}
        if note := append(root_of(jobs[0]), experiment):
            echo_error(f"note: {note}")
    if as_json:
        return json.dumps(document, indent=1, allow_nan=False)
    if not comparisons:
        return nothing(settings)
    return to_text(jobs, settings, notes, map(sentence, comparisons))


def to_text(
    jobs: list[Job], settings: list[Setting], notes: list[str], conclusions: Iterable[str]
) -> str:
    """Return a comparison as text.

    Args:
        conclusions: what it shows, in sentences.
    """
    lines = [f"compared by {_objective(jobs)}", *_table(settings)]
    lines += [f"note: {note}" for note in notes]
    lines += conclusions
    return printable("\n".join(line.replace("\n", "\\n") for line in lines))


def sentences(groups: list[Group], directories: list[Path], most: int) -> list[str]:
    """Return what a comparison shows of the best settings against the first; [] of one setting.

    Args:
        groups: as `replicates` returns them.
        most: comparisons that have a sentence.
    """
    settings = settings_of(groups, directories)
    if len(settings) < 2:
        return []
    comparisons = compare(settings)
    if not comparisons:
        return [nothing(settings)]
    conclusions = [sentence(comparison) for comparison in comparisons[:most]]
    if len(comparisons) > most:
        conclusions.append(f"and {len(comparisons) - most} more: `{compare_command(directories)}`")
    return conclusions + _correction(pairs_of(settings))


def nothing(settings: list[Setting]) -> str:
    """Return why nothing can be said of settings without replicates, and what to do."""
    if all(setting.complete == 1 for setting in settings):
        why = "each setting has one seed, which says nothing about chance"
    else:
        why = "no setting has two seeds that are complete"
    return f"nothing can be said: {why}; {MORE_SEEDS}"


def sentence(comparison: Comparison) -> str:
    """Return what a comparison shows, in a sentence."""
    best = comparison.best.label
    other = comparison.other.label
    difference = comparison.difference
    if difference is None:
        return f"nothing can be said of {other} against {best}: {comparison.why}"
    if comparison.is_better:
        return f"{best} is better than {other} by {_amount(difference, comparison.p)}"
    return f"no difference shown between {best} and {other}: {_amount(difference, comparison.p)}"


def _amount(difference: Difference, p: float) -> str:
    """Return `0.314 ± 0.052 (95% interval 0.262 to 0.366, 3 paired seeds, p = 0.002)`."""
    half = (difference.high - difference.low) / 2
    decimals = min(max(1 - math.floor(math.log10(half)), 0), MOST_DECIMALS)
    mean, half_width, low, high = (
        f"{value:.{decimals}f}"
        for value in (difference.difference, half, difference.low, difference.high)
    )
    ours, theirs = difference.seeds
    seeds = f"{ours} paired seeds" if difference.test == PAIRED else f"{ours} and {theirs} seeds"
    chance = f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"
    return f"{mean} ± {half_width} (95% interval {low} to {high}, {seeds}, {chance})"


def _objective(jobs: list[Job]) -> str:
    objective = jobs[0].ranked_by
    if objective is LOSS and all(is_text(job.config) for job in jobs):
        return f"{objective.title}, in nats per token"
    return objective.title


def notes_on(
    jobs: list[Job], settings: list[Setting], pairs: int, directories: list[Path]
) -> list[str]:
    """Return what the comparison of so many pairs leaves out, or takes together.

    Args:
        directories: as of `comparison_notes`.
    """
    notes = comparison_notes(jobs, directories) + pooling_notes(replicates(jobs))
    for job in jobs:
        notes += job.notes
    for setting in settings:
        if setting.left_out:
            notes.append(
                f"{counted(setting.left_out, 'job')} of {setting.label} not counted: not complete, "
                "or with a loss that is not finite"
            )
    return notes + _correction(pairs)


def _correction(pairs: int) -> list[str]:
    """Return a note on the p-values of several comparisons."""
    if pairs < 2:
        return []
    return [
        f"p is corrected for all {pairs} pairs of settings (Holm); each interval is that of "
        "its comparison alone"
    ]


def _table(settings: list[Setting]) -> list[str]:
    rows = [["mean", "seeds", "deviation", "95% interval", "setting"]]
    for setting in settings:
        estimate = setting.estimate
        interval = "-" if estimate.low is None else f"{estimate.low:.4f} to {estimate.high:.4f}"
        mean, deviation = (fixed(value, ".4f") for value in (estimate.mean, estimate.deviation))
        rows.append([mean, str(estimate.n), deviation, interval, setting.label])
    return table_lines(rows, left=(4,))


def to_numbers(
    jobs: list[Job],
    settings: list[Setting],
    comparisons: list[Comparison],
    notes: list[str],
    pairs: int,
) -> dict[str, Any]:
    """Return the comparison as JSON's types."""
    listed = []
    for setting in settings:
        codes = sorted({job.code for job in setting.jobs if job.code})
        more = {"by_seed": setting.by_seed, "left_out": setting.left_out, "codes": codes}
        listed.append({"name": setting.label, **asdict(setting.estimate), **more})
    best = min((each.best for each in comparisons), key=by_objective, default=None)
    return {
        "objective": jobs[0].ranked_by.series,
        "best": best.label if best else None,
        "settings": listed,
        "comparisons": [_comparison_numbers(comparison) for comparison in comparisons],
        "pairs_corrected_for": pairs,
        "notes": notes if comparisons else [*notes, nothing(settings)],
    }


def _comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    numbers: dict[str, Any] = {"other": comparison.other.label, "is_better": comparison.is_better}
    numbers["sentence"] = sentence(comparison)
    if comparison.difference:
        numbers |= {**asdict(comparison.difference), "p_corrected": comparison.p}
    return numbers
