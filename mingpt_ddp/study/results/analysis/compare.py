"""Compare one setting with each other one. Each has the results of several seeds."""

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

KEYS_IN_NAME = 3
MORE_SEEDS = "train more of them in a grid, not in a search: -m run.seed=1,2,3"
PART = "trainer.eval_steps"  # the evaluated part of the validation split; null for all of it


@dataclass(frozen=True)
class Setting(Group):
    """Jobs that differ only in their seed, under a unique label."""

    label: str

    @property
    def unfinished(self) -> int:
        """The number of jobs that are not complete and have not diverged."""
        return sum(job.status not in ("complete", DIVERGED) for job in self.jobs)

    @cached_property
    def record(self) -> SequentialRecord | None:
        """The record of until=decided that names runs of this setting, or None."""
        for parent in dict.fromkeys(job.directory.parent for job in self.jobs):
            record = read_sequential(parent)
            if record and self.label_in(record):
                return record
        return None

    def label_in(self, record: SequentialRecord) -> str | None:
        """Return the label of this setting in a record, or None if that has none of its runs."""
        labels = (record.setting_of(job.directory) for job in self.jobs)
        return next(filter(None, labels), None)


@dataclass(frozen=True)
class SequentialVerdict:
    """The result of a comparison with until=decided, beside the difference itself."""

    decision: Decision
    pairs: int  # number of pairs of seeds that were tested
    planned: int  # number of pairs if all seeds are trained
    care: float | None  # smallest difference that matters to the user
    comparisons: int  # number of settings compared with the reference; p is corrected for all


@dataclass
class Comparison:
    """The reference against another setting. Every verdict comes from here.

    The tested difference alone decides which setting is called better. Means over other seeds do
    not count.
    """

    reference: Setting
    other: Setting
    # Cost of the other setting minus cost of the reference: positive if the reference is better.
    # None if nothing can be said.
    difference: Difference | None
    why: str | None  # the reason if nothing can be said
    p: float = 1.0  # p-value of the difference, corrected for all pairs of settings
    sequential: SequentialVerdict | None = None  # None if the number of seeds was fixed

    @property
    def in_order(self) -> tuple[Setting, Setting]:
        """Both settings. The one that is better over the tested seeds comes first."""
        if self.difference is not None and self.difference.difference < 0:
            return self.other, self.reference
        return self.reference, self.other

    @property
    def better(self) -> Setting | None:
        """The setting that is better by more than chance; None if neither is."""
        return self.in_order[0] if self.difference is not None and self.p < LEVEL else None

    @property
    def worse(self) -> Setting | None:
        """The setting that is worse by more than chance; None if neither is."""
        return self.in_order[1] if self.better else None


def settings_of(groups: list[Group], directories: list[Path]) -> list[Setting]:
    """Return the settings: jobs that differ in `run.seed` alone, the best first.

    Directories with the same recipe are settings of their own if they have trained the same seeds
    (the code or the machine differs), or if there is nothing else to compare.

    Args:
        groups: As `replicates` returns them.
    """
    keys = varying(groups)

    def part_of(job: RunRecord) -> Path | None:
        return next(filter(job.directory.is_relative_to, directories), None)

    settings = []
    for group in groups:
        parts = grouped(group.jobs, part_of)
        if not _are_settings(parts.values(), is_only=len(groups) == 1):
            parts = {None: group.jobs}
        for part, members in parts.items():
            settings.append(Setting(members, group.config, _label(group, keys, part)))
    labels = [each.label for each in settings]
    if len({*labels}) < len(labels):
        settings = [replace(each, label=f"{n}: {each.label}") for n, each in enumerate(settings, 1)]
    return sorted(settings, key=by_objective)


def compare(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the best setting, as `best_group` chooses it, with each other one.

    The data choose the best setting, which in effect compares every pair. The p-values are
    therefore corrected for all pairs of settings with two seeds, not only for those with the best.

    Args:
        settings: As `settings_of` returns them.

    Returns:
        A comparison for each other setting. The list is empty if no setting has a mean over two
        seeds. If the settings were trained with until=decided, they are compared with the first
        setting of their sweep instead, and the recorded decisions count.
    """
    if (comparisons := _recorded(settings)) is not None:
        return comparisons
    best = best_group(settings)
    if best is None or best.complete < 2:
        return []
    return _compare(best, settings, pairs_of(settings))


def compare_with_first(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the first setting, which no result has chosen, with each other one."""
    if (comparisons := _recorded(settings)) is not None:
        return comparisons
    return _compare(settings[0], settings, len(settings) - 1)


def _compare(reference: Setting, settings: Sequence[Setting], tests: int) -> list[Comparison]:
    """Compare the reference with each other setting, with p corrected for all tests."""
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
    """Compare settings that were trained with until=decided, by their recorded decisions.

    Returns:
        None if the settings do not all belong to one such comparison, if its reference is not among
        them, or if they are ranked by another metric than the recorded one.
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
        # A setting whose first job has diverged has no run that counts.
        if labels.count(label) > 1 if label else setting.complete:
            return None
        if setting is not reference:
            comparisons.append(_sequential(record, label, reference, setting))
    return comparisons


def _sequential(
    record: SequentialRecord, label: str | None, reference: Setting, other: Setting
) -> Comparison:
    """Compare a setting with the reference on the pairs that decided, or on all pairs so far."""
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
        decision, len(pairs), len(record.seeds), record.care, record.test.comparisons
    )
    if evidence is None or not math.isfinite(evidence.high):
        return Comparison(reference, other, None, why, sequential=verdict)
    n = len(pairs)
    left_out = max(0, reference.complete + other.complete - 2 * n)
    interval = (evidence.low, evidence.high)
    found = Difference(evidence.difference, *interval, evidence.p, SEQUENTIAL, (n, n), left_out)
    return Comparison(reference, other, found, why, evidence.p, verdict)


def pairs_of(settings: Iterable[Setting]) -> int:
    """Return the number of pairs of settings that have two seeds and a mean and are comparable."""
    tested = [each for each in settings if each.complete > 1 and not each.diverged]
    parts = Counter(identity(each.config.get(PART)) for each in tested)
    return sum(math.comb(count, 2) for count in parts.values())


def _are_settings(parts: Collection[list[RunRecord]], is_only: bool) -> bool:
    """Return True if the directories of a group are compared with each other."""
    if is_only and any(len(jobs) > 1 for jobs in parts):
        return True
    seeds = Counter(seed for jobs in parts for seed in {*map(seed_of, jobs)})
    return max(seeds.values()) > 1


def _why_incomparable(one: Setting, other: Setting) -> str | None:
    """Return the reason if nothing can be said about the difference, else None."""
    for setting, name in ((other, "it"), (one, one.label)):
        if setting.diverged:
            seeds = counted(setting.seeds, "seed")
            return f"{name} has a loss that is not finite at {len(setting.diverged)} of {seeds}"
        if not setting.complete and setting.unfinished < len(setting.jobs):
            return f"{name} has complete jobs, but none of them has recorded {one.ranked_by.title}"
        if setting.complete < 2:
            one_seed = "one seed, which says nothing about chance"
            return f"{name} has {one_seed if setting.complete else 'no complete job'}; {MORE_SEEDS}"
    for setting in (one, other):
        if setting.record is not None:
            return (
                f"the results of {setting.label} have chosen its number of seeds (until=decided); "
                "it compares with the first setting of its own sweep, by the metric of that sweep"
            )
    if one.config.get(PART) != other.config.get(PART):
        return (
            f"they were measured on different parts of the validation split ({PART}); "
            f"measure both with {command('evaluate')}"
        )
    return why_incomparable(one.by_seed, other.by_seed)


def _label(group: Group, keys: list[str], part: Path | None) -> str:
    """Label a group by the values that distinguish it, or by its name, and by its directory."""
    words = assignments(group, keys)
    text = cut(group.name)
    if 0 < len(words) <= KEYS_IN_NAME:
        text = ", ".join(words)
    if part is None:
        return text
    name = cut(part.resolve().name)
    return f"{name} ({text})" if keys else name
