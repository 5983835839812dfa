"""Compare settings, each with the results of several seeds: the best one with each other one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mingpt_ddp.errors import command
from mingpt_ddp.results.formats import cut, short_names, shown
from mingpt_ddp.results.groups import Group, by_objective, replicates, seed_of
from mingpt_ddp.results.runs import Job, identity, varying
from mingpt_ddp.results.stats.significance import (
    LEVEL,
    Difference,
    difference,
    holm,
    why_incomparable,
)

KEYS_IN_NAME = 3
PART = "trainer.eval_steps"  # of the validation split; null: all of it
Parts = dict[Path | str | None, list[Job]]  # of a group, by directory or by code


@dataclass(frozen=True)
class Setting(Group):
    """Jobs that differ in their seed, under a name that no other setting has."""

    label: str

    @property
    def left_out(self) -> int:
        """The number of jobs without an objective: not complete, or with a loss not finite."""
        return sum(job.objective is None for job in self.jobs)


@dataclass(frozen=True)
class Comparison:
    """The best setting against another one."""

    best: Setting
    other: Setting
    difference: Difference | None  # other - best; None if nothing can be said
    why: str | None  # not
    p: float  # of the difference, corrected for all pairs of settings
    pairs: int  # for which it is

    @property
    def is_better(self) -> bool:
        """Whether the best setting is better than the other by more than chance."""
        return self.difference is not None and self.p < LEVEL


def settings_of(jobs: list[Job], directories: list[Path], by_code: bool = False) -> list[Setting]:
    """Return the settings: jobs that differ in `run.seed` alone, the best first.

    Directories with the same recipe are settings of their own if they have trained the same seeds
    (the code or the machine differs), or if there is nothing else to compare.

    Args:
        by_code: versions of the code are settings of their own, whatever their directories.
    """
    groups = replicates(jobs)
    keys = varying(groups)
    settings = []
    for group in groups:
        parts = _by_code(group) if by_code else _by_directory(group, directories)
        if not by_code and not _are_settings(parts, is_only=len(groups) == 1):
            parts = {None: group.jobs}
        for part, members in parts.items():
            label = _label(group, keys, part)
            settings.append(Setting(members, group.config, label))
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
    replicated = [each for each in settings if each.complete > 1]
    if not replicated:
        return []
    best = replicated[0]
    others = [each for each in settings if each is not best]
    reasons = {each.label: _why_incomparable(best, each) for each in others}
    tests = {
        each.label: difference(best.by_seed, each.by_seed)
        for each in others
        if reasons[each.label] is None
    }
    parts = Counter(identity(each.config.get(PART)) for each in replicated)  # comparable within
    pairs = sum(math.comb(count, 2) for count in parts.values())
    corrected = dict(zip(tests, holm([test.p for test in tests.values()], pairs), strict=True))
    comparisons = []
    for each in others:
        label = each.label
        p = corrected.get(label, 1.0)
        comparisons.append(Comparison(best, each, tests.get(label), reasons[label], p, pairs))
    return comparisons


def _by_code(group: Group) -> Parts:
    """Return the jobs of a group by the code that has trained them."""
    parts: Parts = {}
    for job in group.jobs:
        parts.setdefault(f"code {job.code or 'unknown'}", []).append(job)
    return parts


def _by_directory(group: Group, directories: list[Path]) -> Parts:
    """Return the jobs of a group by the directory, named on the command line, that holds them."""
    parts: Parts = {}
    for job in group.jobs:
        holders = [path for path in directories if job.directory.is_relative_to(path)]
        parts.setdefault(holders[0] if holders else None, []).append(job)
    return parts


def _are_settings(parts: Parts, is_only: bool) -> bool:
    """Return whether the directories of a group are compared with each other."""
    if is_only and any(len(jobs) > 1 for jobs in parts.values()):
        return True
    seeds: list[str] = []
    for jobs in parts.values():
        seeds += {seed_of(job) for job in jobs}
    return len({*seeds}) < len(seeds)


def _why_incomparable(one: Setting, other: Setting) -> str | None:
    """Return why nothing can be said about the difference; None if there is a test."""
    if one.config.get(PART) != other.config.get(PART):
        return (
            f"they were measured on different parts of the validation split ({PART}); "
            f"measure both with {command('evaluate')}"
        )
    return why_incomparable(one.by_seed, other.by_seed)


def _label(group: Group, keys: list[str], part: Path | str | None) -> str:
    """Return the values that distinguish a group, or its name; and its part, if given."""
    names = short_names(keys)
    words = []
    for key in keys:
        if key in group.config:
            words.append(f"{names[key]}={shown(group.config[key])}")
    text = cut(group.name)
    if 0 < len(words) <= KEYS_IN_NAME:
        text = ", ".join(words)
    if part is None:
        return text
    name = cut(part.resolve().name) if isinstance(part, Path) else part
    return f"{name} ({text})" if keys else name
