"""Compare settings, each with the results of several seeds: the best one with each other one."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mingpt_ddp.errors import command
from mingpt_ddp.results.formats import assignments, cut
from mingpt_ddp.results.groups import Group, seed_of
from mingpt_ddp.results.runs import Job, by_objective, grouped, identity, varying
from mingpt_ddp.results.stats.significance import (
    LEVEL,
    Difference,
    difference,
    holm,
    why_incomparable,
)

KEYS_IN_NAME = 3
MORE_SEEDS = "train more of them: -m run.seed=1,2,3"
PART = "trainer.eval_steps"  # of the validation split; null: all of it


@dataclass(frozen=True)
class Setting(Group):
    """Jobs that differ in their seed, under a name that no other setting has."""

    label: str

    @property
    def left_out(self) -> int:
        """The number of jobs without an objective: not complete, or with a loss not finite."""
        return sum(job.objective is None for job in self.jobs)


@dataclass
class Comparison:
    """The best setting against another one."""

    best: Setting
    other: Setting
    difference: Difference | None  # other - best; None if nothing can be said
    why: str | None  # nothing can be said
    p: float = 1.0  # of the difference, corrected for all pairs of settings

    @property
    def is_better(self) -> bool:
        """Whether the best setting is better than the other by more than chance."""
        return self.difference is not None and self.p < LEVEL


def settings_of(
    groups: list[Group], directories: list[Path], by_code: bool = False
) -> list[Setting]:
    """Return the settings: jobs that differ in `run.seed` alone, the best first.

    Directories with the same recipe are settings of their own if they have trained the same seeds
    (the code or the machine differs), or if there is nothing else to compare.

    Args:
        groups: as `replicates` returns them.
        by_code: versions of the code are settings of their own, whatever their directories.
    """
    keys = varying(groups)

    def part_of(job: Job) -> str | Path | None:
        if by_code:
            return f"code {job.code or 'unknown'}"
        return next(filter(job.directory.is_relative_to, directories), None)

    settings = []
    for group in groups:
        parts = grouped(group.jobs, part_of)
        if not by_code and not _are_settings(parts.values(), is_only=len(groups) == 1):
            parts = {None: group.jobs}
        for part, members in parts.items():
            settings.append(Setting(members, group.config, _label(group, keys, part)))
    labels = [each.label for each in settings]
    if len({*labels}) < len(labels):
        settings = [replace(each, label=f"{n}: {each.label}") for n, each in enumerate(settings, 1)]
    return sorted(settings, key=by_objective)


def compare(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the best setting that has two seeds with each other one.

    The data choose which setting is the best, so that each pair of settings has been compared: the
    p-values are corrected for all pairs of those with two seeds, not only for those with the best.

    Args:
        settings: the best first, as `settings_of` returns them.
    """
    best = next((each for each in settings if each.complete > 1), None)
    if best is None:
        return []
    others = [each for each in settings if each is not best]
    return _compare_pairs([(best, other) for other in others], pairs_of(settings))


def compare_with_first(settings: Sequence[Setting]) -> list[Comparison]:
    """Compare the first setting, which no result has chosen, with each other one."""
    first, *others = settings
    pairs = [sorted((first, other), key=by_objective) for other in others]
    return _compare_pairs(pairs, len(pairs))


def _compare_pairs(pairs: Iterable[Sequence[Setting]], tests: int) -> list[Comparison]:
    """Compare settings of which the first has the lower mean, with p corrected for all tests."""
    comparisons = []
    for best, other in pairs:
        why = _why_incomparable(best, other)
        test = None if why else difference(best.by_seed, other.by_seed)
        comparisons.append(Comparison(best, other, test, why))
    tested = [comparison for comparison in comparisons if comparison.difference]
    ps = [comparison.difference.p for comparison in tested if comparison.difference]
    for comparison, p in zip(tested, holm(ps, tests), strict=True):
        comparison.p = p
    return comparisons


def pairs_of(settings: Iterable[Setting]) -> int:
    """Return the number of pairs of settings that have two seeds and are comparable."""
    parts = Counter(identity(each.config.get(PART)) for each in settings if each.complete > 1)
    return sum(math.comb(count, 2) for count in parts.values())


def _are_settings(parts: Collection[list[Job]], is_only: bool) -> bool:
    """Return whether the directories of a group are compared with each other."""
    if is_only and any(len(jobs) > 1 for jobs in parts):
        return True
    seeds = Counter(seed for jobs in parts for seed in {*map(seed_of, jobs)})
    return max(seeds.values()) > 1


def _why_incomparable(one: Setting, other: Setting) -> str | None:
    """Return why nothing can be said about the difference; None if there is a test."""
    if other.complete < 2:
        why = "one seed, which says nothing about chance" if other.complete else "no complete job"
        return f"it has {why}; {MORE_SEEDS}"
    if one.config.get(PART) != other.config.get(PART):
        return (
            f"they were measured on different parts of the validation split ({PART}); "
            f"measure both with {command('evaluate')}"
        )
    return why_incomparable(one.by_seed, other.by_seed)


def _label(group: Group, keys: list[str], part: Path | str | None) -> str:
    """Return the values that distinguish a group, or its name; and its part, if given."""
    words = assignments(group, keys)
    text = cut(group.name)
    if 0 < len(words) <= KEYS_IN_NAME:
        text = ", ".join(words)
    if part is None:
        return text
    name = cut(part.resolve().name) if isinstance(part, Path) else part
    return f"{name} ({text})" if keys else name
