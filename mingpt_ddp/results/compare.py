"""Compare settings, each with the results of several seeds: the best one with each other one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mingpt_ddp.errors import command
from mingpt_ddp.results.formats import cut, short_names, shown
from mingpt_ddp.results.groups import Group, means_by_seed, replicates, seed_of
from mingpt_ddp.results.intervals import Estimate, estimate
from mingpt_ddp.results.runs import Job, Value, identity, varying
from mingpt_ddp.results.significance import LEVEL, Difference, difference, holm, why_incomparable

KEYS_IN_NAME = 3


@dataclass(frozen=True)
class Side:
    """A setting: jobs that differ in their seed."""

    name: str
    values: dict[str, float]  # the objective by seed
    left_out: int  # jobs without an objective: not complete, or with a loss that is not finite
    eval_steps: Value  # of the validation split; None: all of it

    @property
    def estimate(self) -> Estimate | None:
        return estimate([*self.values.values()]) if self.values else None

    @property
    def has_replicates(self) -> bool:
        """Whether it says anything about chance."""
        return len(self.values) > 1


@dataclass(frozen=True)
class Comparison:
    """The best setting against another one."""

    best: Side
    other: Side
    difference: Difference | None  # other - best; None if nothing can be said
    why: str | None  # not
    p: float  # of the difference, corrected for all pairs of settings
    pairs: int  # for which it is

    @property
    def is_better(self) -> bool:
        """Whether the best setting is better than the other by more than chance."""
        return self.difference is not None and self.p < LEVEL


def sides_of(jobs: list[Job], directories: list[Path]) -> list[Side]:
    """Return the settings: jobs that differ in `run.seed` alone, the best first.

    Directories with the same recipe are settings of their own if they have trained the same seeds
    (the code or the machine differs), or if there is nothing else to compare.
    """
    groups = replicates(jobs)
    keys = varying(groups)
    sides = []
    for group in groups:
        parts = _by_directory(group, directories)
        if not _are_settings(parts, is_only=len(groups) == 1):
            parts = {None: group.jobs}
        for directory, members in parts.items():
            name = _name(group, keys, directory)
            sides.append(_side(name, members))
    names = [side.name for side in sides]
    if len({*names}) < len(names):
        sides = [replace(side, name=f"{n}: {side.name}") for n, side in enumerate(sides, 1)]
    return sorted(sides, key=_rank)


def compare(sides: Sequence[Side]) -> list[Comparison]:
    """Compare the best setting that has two seeds with each other one.

    The data choose which setting is the best, so that each pair of settings has been compared: the
    p-values are corrected for all pairs of those with two seeds, not only for those with the best.

    Args:
        sides: the best first, as `sides_of` returns them.
    """
    replicated = [side for side in sides if side.has_replicates]
    if not replicated:
        return []
    best = replicated[0]
    others = [side for side in sides if side is not best]
    reasons = {side.name: _why_incomparable(best, side) for side in others}
    tests = {
        side.name: difference(best.values, side.values)
        for side in others
        if reasons[side.name] is None
    }
    parts = Counter(identity(side.eval_steps) for side in replicated)  # comparable within each
    pairs = sum(math.comb(count, 2) for count in parts.values())
    corrected = dict(zip(tests, holm([test.p for test in tests.values()], pairs), strict=True))
    return [
        Comparison(best, side, tests.get(name), reasons[name], corrected.get(name, 1.0), pairs)
        for side in others
        for name in [side.name]
    ]


def _by_directory(group: Group, directories: list[Path]) -> dict[Path | None, list[Job]]:
    """Return the jobs of a group by the directory, named on the command line, that holds them."""
    parts: dict[Path | None, list[Job]] = {}
    for job in group.jobs:
        holders = [path for path in directories if job.directory.is_relative_to(path)]
        parts.setdefault(holders[0] if holders else None, []).append(job)
    return parts


def _are_settings(parts: dict[Path | None, list[Job]], is_only: bool) -> bool:
    """Return whether the directories of a group are compared with each other."""
    if is_only and any(len(jobs) > 1 for jobs in parts.values()):
        return True
    seeds: list[str] = []
    for jobs in parts.values():
        seeds += {seed_of(job) for job in jobs}
    return len({*seeds}) < len(seeds)


def _side(name: str, jobs: list[Job]) -> Side:
    values = means_by_seed(jobs, lambda job: job.objective)
    left_out = sum(job.objective is None for job in jobs)
    return Side(name, values, left_out, jobs[0].config.get("trainer.eval_steps"))


def _why_incomparable(one: Side, other: Side) -> str | None:
    """Return why nothing can be said about the difference; None if there is a test."""
    if one.eval_steps != other.eval_steps:
        return (
            "they were measured on different parts of the validation split (trainer.eval_steps); "
            f"measure both with {command('evaluate')}"
        )
    return why_incomparable(one.values, other.values)


def _name(group: Group, keys: list[str], directory: Path | None) -> str:
    """Return the values that distinguish a group, or its name; and its directory, if given."""
    names = short_names(keys)
    words = []
    for key in keys:
        if key in group.config:
            words.append(f"{names[key]}={shown(group.config[key])}")
    text = cut(group.name)
    if 0 < len(words) <= KEYS_IN_NAME:
        text = ", ".join(words)
    if directory is None:
        return text
    name = cut(directory.resolve().name)
    return f"{name} ({text})" if keys else name


def _rank(side: Side) -> tuple[bool, float, str]:
    mean = side.estimate.mean if side.estimate else 0.0
    return side.estimate is None, mean, side.name
