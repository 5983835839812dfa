"""What a report shows of the jobs in some directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mingpt_ddp.metrics.objective import Objective
from mingpt_ddp.sweeps.comparison import comparison_notes, group_notes
from mingpt_ddp.sweeps.groups import Group, best_group, compared, has_replicates, replicates
from mingpt_ddp.sweeps.importance import importances
from mingpt_ddp.sweeps.pareto import Front, front_of, read_goals
from mingpt_ddp.sweeps.runs import Job, read_jobs, varying
from mingpt_ddp.sweeps.scaling_laws import Scaling, scalings


@dataclass(frozen=True)
class Results:
    """The jobs, the groups that are compared, and what is known of them."""

    jobs: list[Job]  # best first
    groups: list[Group]  # best first; each job alone if there are no replicates
    keys: list[str]  # the parameters in which the groups differ
    notes: list[str]  # on their comparison
    front: Front | None = None  # of a search with several objectives
    importance: dict[str, float] = field(default_factory=dict)  # share by key; {} if unknown
    laws: list[Scaling] = field(default_factory=list)  # of a sweep over sizes, data or steps

    @property
    def objective(self) -> Objective:
        """What the jobs are ranked by."""
        return self.jobs[0].ranked_by

    @property
    def has_replicates(self) -> bool:
        return has_replicates(self.groups)

    @property
    def best(self) -> Group | None:
        """The group with the lowest mean objective, of which a job at least is complete."""
        return best_group(self.groups)


def read_results(directories: Sequence[Path]) -> Results:
    """Read and compare the jobs in these directories.

    Args:
        directories: runs, or parents of runs one or two levels below.

    Raises:
        RunError: one of them holds no run.
    """
    jobs = read_jobs([*directories])
    groups = compared(jobs)
    keys = varying(groups)
    notes = comparison_notes(jobs)
    if has_replicates(groups):
        notes += group_notes(groups)
    front = front_of(groups, read_goals(directories))
    laws = scalings(replicates(jobs))
    return Results(jobs, groups, keys, notes, front, importances(groups, keys), laws)
