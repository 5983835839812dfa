"""The Pareto front of a search: of one objective its best row."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.results.runs import number
from mingpt_ddp.storage.lines import MAX_LINE_BYTES
from mingpt_ddp.storage.run_dir import HEADER, JOURNAL
from mingpt_ddp.storage.storage import open_regular

MOST_OBJECTIVES = 8
RANKED_BY = [[LOSS.series], [BITS_PER_BYTE.metric], [BITS_PER_BYTE.series]]


@dataclass(frozen=True)
class Goal:
    """A number of result.json that a search minimizes or maximizes."""

    name: str
    maximize: bool

    @property
    def direction(self) -> str:
        return "maximize" if self.maximize else "minimize"

    def of(self, group: Group) -> float | None:
        """Return the mean over the complete jobs of a group; None if none has it."""
        found = group.estimate_of(
            lambda job: number(job.result.get(self.name)) if job.status == "complete" else None
        )
        return found.mean if found else None


@dataclass(frozen=True)
class Front:
    """The groups that no other group beats in one objective without losing in another."""

    goals: list[Goal]
    values: list[list[float | None]]  # of every group, by goal
    members: list[int]  # their indices


def read_goals(directories: Sequence[Path]) -> list[Goal]:
    """Return the objectives of a search, unless it has what reports rank by anyway; else [].

    The header is untrusted: one that is not as expected counts as none, and so do different ones.
    """
    found = [goals for directory in directories if (goals := _read_goals(directory / JOURNAL))]
    return found[0] if found and all(goals == found[0] for goals in found) else []


def front_of(groups: list[Group], goals: list[Goal]) -> Front | None:
    """Return the Pareto front of the groups that have a value of each goal; None without goals."""
    if not goals:
        return None
    values = [[goal.of(group) for goal in goals] for group in groups]
    costs: dict[int, list[float]] = {}
    for index, row in enumerate(values):
        known = [value for value in row if value is not None]
        if len(known) == len(goals):
            costs[index] = costs_of(goals, known)
    return Front(goals, values, pareto_front(costs))


def costs_of(goals: list[Goal], values: list[float]) -> list[float]:
    """Return values of which the lower is the better."""
    return [-value if goal.maximize else value for goal, value in zip(goals, values, strict=True)]


def pareto_front(costs: dict[int, list[float]]) -> list[int]:
    """Return the keys of the costs that no other dominates; equal ones are all on the front."""
    front: list[int] = []
    # in this order no one is dominated by a later one
    for key in sorted(costs, key=lambda key: costs[key]):
        if not any(_dominates(costs[other], costs[key]) for other in front):
            front.append(key)
    return front


def _dominates(one: list[float], other: list[float]) -> bool:
    pairs = [*zip(one, other, strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _read_goals(path: Path) -> list[Goal]:
    try:
        with open_regular(path) as file:
            file.readline(MAX_LINE_BYTES)  # creates the study
            names = json.loads(file.readline(MAX_LINE_BYTES))["user_attr"][HEADER]["objectives"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return []
    if not isinstance(names, list) or not 1 <= len(names) <= MOST_OBJECTIVES:
        return []
    goals = [_goal(name) for name in names]
    known = [goal for goal in goals if goal is not None]
    if names in RANKED_BY:
        return []
    return known if len({goal.name for goal in known}) == len(names) else []


def _goal(name: Any) -> Goal | None:
    """Parse NAME, or -NAME to maximize."""
    if not isinstance(name, str):
        return None
    plain = name.removeprefix("-")
    return Goal(plain, maximize=plain != name) if plain else None
