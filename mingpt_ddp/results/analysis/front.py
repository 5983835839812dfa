"""The Pareto front of a search: of one objective its best row."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.objective import BITS_PER_BYTE, LOSS
from mingpt_ddp.results.runs import Job, known, number
from mingpt_ddp.storage.lines import MAX_LINE_BYTES
from mingpt_ddp.storage.run_directory import HEADER, JOURNAL
from mingpt_ddp.storage.storage import open_regular

MOST_OBJECTIVES = 8
RANKED_BY = [[LOSS.series], [BITS_PER_BYTE.metric], [BITS_PER_BYTE.series]]


@dataclass(frozen=True)
class Goal:
    """A number of result.json that a search minimizes, or maximizes: -NAME."""

    name: str
    maximize: bool

    @property
    def direction(self) -> str:
        return "maximize" if self.maximize else "minimize"

    def mean_in(self, group: Group) -> float | None:
        """Return the mean over the complete jobs of a group; None if it has none."""

        def measure(job: Job) -> float | None:
            return number(job.result.get(self.name)) if job.status == "complete" else None

        return group.estimate_of(measure).mean


@dataclass(frozen=True)
class Front:
    """The groups that no other group beats in one objective without losing in another."""

    goals: list[Goal]
    members: list[int]  # the indices of the groups


def read_goals(directories: Sequence[Path]) -> list[Goal]:
    """Return the objectives of a search, unless it has what reports rank by anyway; else [].

    The header is untrusted: one that is not as expected counts as none, and so do different ones.
    """
    all_goals = [goals for directory in directories if (goals := _read_goals(directory / JOURNAL))]
    return all_goals[0] if all_goals and all(each == all_goals[0] for each in all_goals) else []


def front_of(groups: Sequence[Group], goals: Sequence[Goal]) -> list[int]:
    """Return the indices of the groups on the Pareto front of these goals.

    Equal groups are all on the front, a group that lacks a goal is not.
    """
    costs = []
    for index, group in enumerate(groups):
        values = known(goal.mean_in(group) for goal in goals)
        if len(values) == len(goals):
            costs.append((_costs(goals, values), index))
    front: list[tuple[list[float], int]] = []
    # in this order no one is dominated by a later one
    for cost, index in sorted(costs):
        if not any(_dominates(other, cost) for other, _ in front):
            front.append((cost, index))
    return [index for _, index in front]


def _costs(goals: Sequence[Goal], values: list[float]) -> list[float]:
    """Return values of which the lower is the better."""
    return [-value if goal.maximize else value for goal, value in zip(goals, values, strict=True)]


def _dominates(one: list[float], other: list[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _read_goals(path: Path) -> list[Goal]:
    try:
        with open_regular(path) as file:
            file.readline(MAX_LINE_BYTES)  # creates the study
            names = json.loads(file.readline(MAX_LINE_BYTES))["user_attr"][HEADER]["objectives"]
        if not isinstance(names, list) or names in RANKED_BY:
            return []
        goals = [Goal(name.removeprefix("-"), name.startswith("-")) for name in names]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []
    distinct = {goal.name for goal in goals} - {""}
    return goals if len(distinct) == len(goals) <= MOST_OBJECTIVES else []
