"""Compare one setting with each other setting, by their results with several seeds.

A setting is a configuration without its seed. With sweep.until=decided, a sweep trains its settings
with more and more seeds until the comparison is decided, and records the decisions.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mingpt_ddp.errors import command, counted
from mingpt_ddp.study.results.formats import assignments, cut
from mingpt_ddp.study.results.groups import Group, best_group, seed_of
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.results.runs import (
    DIVERGED,
    RunRecord,
    by_objective,
    grouped,
    identity,
    varying,
)
from mingpt_ddp.study.results.sequential_record import SequentialRecord, read_sequential
from mingpt_ddp.study.results.stats.sequential import Decision
from mingpt_ddp.study.results.stats.significance import (
    LEVEL,
    SEQUENTIAL,
    Difference,
    difference,
    holm,
    why_incomparable,
)

MAX_KEYS_IN_LABEL = 3
MORE_SEEDS = "train more seeds in a grid, not in a search: -m run.seed=1,2,3"
# This key sets the part of the validation split that is evaluated. null means all of it.
EVALUATED_PART = "trainer.eval_steps"


@dataclass(frozen=True)
class Setting(Group):
    """Jobs that differ only in their seed, under a unique label."""

    label: str

    @property
    def n_unfinished(self) -> int:
        """Number of jobs that are neither complete nor diverged."""
        return sum(job.status not in ("complete", DIVERGED) for job in self.jobs)

    @cached_property
    def record(self) -> SequentialRecord | None:
        """The record of until=decided that has runs of this setting, or None."""
        for parent in dict.fromkeys(job.directory.parent for job in self.jobs):
            record = read_sequential(parent)
            if record and self.label_in(record):
                return record
        return None

    def label_in(self, record: SequentialRecord) -> str | None:
        """Return the label of this setting in a record, or None if the record has no run of it."""
        labels = (record.setting_of(job.directory) for job in self.jobs)
        return next(filter(None, labels), None)


@dataclass(frozen=True)
class SequentialVerdict:
    """The result of a comparison with until=decided, in addition to its `Difference`."""

    decision: Decision
    n_pairs: int  # number of tested pairs of seeds
    n_planned: int  # number of pairs if all seeds are trained
    smallest_relevant: float | None  # the smallest difference that matters to the user
    n_comparisons: int  # number of settings that are compared with the reference


@dataclass
class Comparison:
    """The reference compared with another setting. All verdicts are derived from this.

    Only the tested difference decides which setting is called better. Means over other seeds do not
    count.
    """

    reference: Setting
    other: Setting
    # Cost of the other setting minus cost of the reference: positive if the reference is better.
    # None if nothing can be said.
    difference: Difference | None
    why: str | None  # the reason why nothing can be said, else None
    p: float = 1.0  # p-value of the difference, corrected for all pairs of settings
    sequential: SequentialVerdict | None = None  # None if the number of seeds was fixed

    @property
    def in_order(self) -> tuple[Setting, Setting]:
        """Both settings. The better setting over the tested seeds comes first."""
        if self.difference is not None and self.difference.difference < 0:
            return self.other, self.reference
        return self.reference, self.other

    @property
    def better(self) -> Setting | None:
        """The setting that is better by more than chance. None if there is no such setting."""
        return self.in_order[0] if self.difference is not None and self.p < LEVEL else None

    @property
    def worse(self) -> Setting | None:
        """The setting that is worse by more than chance. None if there is no such setting."""
        return self.in_order[1] if self.better else None


def settings_of(groups: list[Group], directories: list[Path]) -> list[Setting]:
    """Divide groups of jobs into the settings to compare. The best setting comes first.

    The jobs of a group differ only in `run.seed` and make one setting. If they are in several
    directories, each directory is a setting of its own in two cases: the directories have jobs with
    the same seeds (so the code or the machine differs), or there is nothing else to compare.

    Args:
        groups: Groups as `replicates` returns them.
        directories: Directories from the command line.
    """
    keys = varying(groups)

    def directory_of(job: RunRecord) -> Path | None:
        return next(filter(job.directory.is_relative_to, directories), None)

    settings = []
    for group in groups:
        parts = grouped(group.jobs, directory_of)
        if not _are_settings(parts.values(), is_only=len(groups) == 1):
            parts = {None: group.jobs}
        for directory, members in parts.items():
            settings.append(Setting(members, group.config, _label(group, keys, directory)))
    labels = [each.label for each in settings]
    if len({*labels}) < len(labels):
        settings = [replace(each, label=f"{n}: {each.label}") for n, each in enumerate(settings, 1)]
    return sorted(settings, key=by_objective)


def compare(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the best setting, as `best_group` chooses it, with each other setting.

    The results choose the best setting, which in effect compares every pair of settings. The
    p-values are therefore corrected for all pairs of settings with two seeds, not only for the
    pairs with the best setting.

    Args:
        settings: Settings as `settings_of` returns them.

    Returns:
        A comparison for each other setting. The list is empty if no setting has a mean over two
        seeds. If the settings were trained with until=decided, they are compared with the first
        setting of their sweep instead, and the recorded decisions count.
    """
    if (comparisons := _recorded(settings)) is not None:
        return comparisons
    best = best_group(settings)
    if best is None or best.n_complete < 2:
        return []
    return _compare(best, settings, pairs_of(settings))


def compare_with_first(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the first setting, which was fixed before any result, with each other setting."""
    if (comparisons := _recorded(settings)) is not None:
        return comparisons
    return _compare(settings[0], settings, len(settings) - 1)


def _compare(reference: Setting, settings: Sequence[Setting], tests: int) -> list[Comparison]:
    """Compare the reference with each other setting, and correct p for this number of tests."""
    comparisons = []
    for other in settings:
        if other is not reference:
            why = _why_incomparable(reference, other)
            test = None if why else difference(reference.costs, other.costs)
            comparisons.append(Comparison(reference, other, test, why))
    tested = [comparison for comparison in comparisons if comparison.difference]
    ps = [comparison.difference.p for comparison in tested if comparison.difference]
    for comparison, p in zip(tested, holm(ps, tests), strict=True):
        comparison.p = p
    return comparisons


def _recorded(settings: Sequence[Setting]) -> list[Comparison] | None:
    """Compare settings that were trained with until=decided, using the recorded decisions.

    Returns:
        None if the settings do not all belong to one such comparison, if its reference is not among
        them, or if they are not ranked by the recorded metric.
    """
    record = next(filter(None, (setting.record for setting in settings)), None)
    parents = {job.directory.parent for setting in settings for job in setting.jobs}
    if record is None or len(parents) > 1:
        return None
    if objective_named(record.metric) != settings[0].ranked_by:
        return None
    labels = [setting.label_in(record) for setting in settings]
    if labels.count(record.reference) != 1:
        return None
    reference = settings[labels.index(record.reference)]
    comparisons = []
    for label, setting in zip(labels, settings, strict=True):
        # A setting without a label is not in the record. This is possible if its first job has
        # diverged, but then it has no complete job.
        if labels.count(label) > 1 if label else setting.n_complete:
            return None
        if setting is not reference:
            comparisons.append(_sequential(record, label, reference, setting))
    return comparisons


def _sequential(
    record: SequentialRecord, label: str | None, reference: Setting, other: Setting
) -> Comparison:
    """Compare a setting with the reference.

    If the comparison is decided, only the recorded pairs of the decision count. Otherwise all pairs
    so far count.
    """
    pairs, missing = record.pairs(reference.costs, other.costs)
    why = None
    for setting in (reference, other):
        if missing in setting.diverged:
            why = f"seed {missing} of {setting.label} diverged"
    if label in record.decided:
        pairs, why = record.decided[label], None
    evidence = record.test.evidence(pairs)
    if evidence is None and len(pairs) > 1 and why is None:
        why = "the difference is the same with each seed, which says nothing about chance"
    decision = Decision.UNDECIDED if evidence is None else evidence.decision
    verdict = SequentialVerdict(
        decision, len(pairs), len(record.seeds), record.care, record.test.n_comparisons
    )
    if evidence is None or not math.isfinite(evidence.high):
        return Comparison(reference, other, None, why, sequential=verdict)
    n = len(pairs)
    left_out = max(0, reference.n_complete + other.n_complete - 2 * n)
    interval = (evidence.low, evidence.high)
    found = Difference(evidence.difference, *interval, evidence.p, SEQUENTIAL, (n, n), left_out)
    return Comparison(reference, other, found, why, evidence.p, verdict)


def pairs_of(settings: Iterable[Setting]) -> int:
    """Count the pairs of comparable settings. Both settings need two seeds and a mean."""
    tested = [each for each in settings if each.n_complete > 1 and not each.diverged]
    parts = Counter(identity(each.config.get(EVALUATED_PART)) for each in tested)
    return sum(math.comb(count, 2) for count in parts.values())


def _are_settings(parts: Collection[list[RunRecord]], is_only: bool) -> bool:
    """Return True if the directories of a group are settings that are compared with each other."""
    if is_only and any(len(jobs) > 1 for jobs in parts):
        return True
    seeds = Counter(seed for jobs in parts for seed in {*map(seed_of, jobs)})
    return max(seeds.values()) > 1


def _why_incomparable(one: Setting, other: Setting) -> str | None:
    """Explain why the difference cannot be tested. Return None if it can."""
    for setting, name in ((other, "it"), (one, one.label)):
        if setting.diverged:
            seeds = counted(setting.n_seeds, "seed")
            return f"{name} has a loss that is not finite at {len(setting.diverged)} of {seeds}"
        if not setting.n_complete and setting.n_unfinished < len(setting.jobs):
            return f"{name} has complete jobs, but none of them has recorded {one.ranked_by.title}"
        if setting.n_complete < 2:
            one_seed = "one seed, which says nothing about chance"
            return (
                f"{name} has {one_seed if setting.n_complete else 'no complete job'}; {MORE_SEEDS}"
            )
    for setting in (one, other):
        if setting.record is not None:
            return (
                f"the results of {setting.label} decided how many seeds it has (until=decided); "
                "compare it only with the first setting of its sweep, by the metric of that sweep"
            )
    if one.config.get(EVALUATED_PART) != other.config.get(EVALUATED_PART):
        return (
            f"they were measured on different parts of the validation split ({EVALUATED_PART}); "
            f"measure both with {command('evaluate')}"
        )
    return why_incomparable(one.by_seed, other.by_seed)


def _label(group: Group, keys: list[str], directory: Path | None) -> str:
    """Label a group by the values that distinguish it, or else by its name.

    Args:
        keys: Keys whose values differ between the groups.
        directory: Directory of the jobs, if each directory is a setting of its own.
    """
    words = assignments(group, keys)
    text = cut(group.name)
    if 0 < len(words) <= MAX_KEYS_IN_LABEL:
        text = ", ".join(words)
    if directory is None:
        return text
    name = cut(directory.resolve().name)
    return f"{name} ({text})" if keys else name
