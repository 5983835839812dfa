"""Read the jobs in some directories, group them, and collect notes on them, for a report."""

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from mingpt_ddp.storage.storage import read_regular
from mingpt_ddp.storage.sweep_file import JobFailure, read_failures
from mingpt_ddp.study.results.formats import cut
from mingpt_ddp.study.results.groups import (
    Group,
    accepts_code,
    best_group,
    has_replicates,
    replicates,
    singles,
)
from mingpt_ddp.study.results.notes import (
    best_notes,
    comparison_notes,
    diverged_notes,
    minutes_notes,
    pooling_notes,
)
from mingpt_ddp.study.results.objective import Objective
from mingpt_ddp.study.results.runs import RunRecord, is_locked, known, number, read_jobs, varying

MAX_REASON = 300  # longest reason of a failure in a note, in characters
MULTIRUN = "multirun.yaml"  # file in which Hydra records the last start of a sweep
MAX_MULTIRUN_BYTES = 1 << 20
# Matches a key that a search samples on a logarithmic scale, such as optimizer.lr=tag(log, ...).
SEARCHED_BY_LOGARITHM = re.compile(r"([\w.]+)(?:=|: )\W?tag\(\s*log\b")


@dataclass(frozen=True)
class Results:
    """The jobs of a report, the groups that the report compares, and notes on both."""

    jobs: list[RunRecord]  # the best job comes first
    groups: list[Group]  # the best group comes first; without replicates, each job is a group
    keys: list[str]  # the parameters in which the groups differ
    notes: list[str]  # notes on the comparison of the groups
    directories: list[Path] = field(default_factory=list)  # directories from the command line

    @property
    def objective(self) -> Objective:
        """The number that ranks the jobs."""
        return self.jobs[0].ranked_by

    @cached_property
    def has_replicates(self) -> bool:
        """True if any group has several seeds."""
        return has_replicates(self.groups)

    @property
    def only_job(self) -> RunRecord | None:
        """The job if there is only one job, so that there is nothing to compare. None otherwise."""
        return self.jobs[0] if len(self.jobs) == 1 else None

    @property
    def unread(self) -> list[str]:
        """Notes on files of the jobs that cannot be read."""
        return [note for job in self.jobs for note in job.notes]

    @property
    def is_running(self) -> bool:
        """True if a process is training a job, or is between two jobs of a sweep."""
        return any(map(is_locked, [*self.directories, *(job.directory for job in self.jobs)]))

    @property
    def best(self) -> Group | None:
        """The best group, as `best_group` chooses it."""
        return best_group(self.groups)

    @cached_property
    def logarithmic(self) -> set[str]:
        """The parameters that were searched on a logarithmic scale.

        These are the keys with tag(log, ...), and the keys of a grid whose values at least double.
        """
        keys = set[str]()
        for directory in {job.directory.parent for job in self.jobs}:
            with contextlib.suppress(OSError):
                text = read_regular(directory / MULTIRUN, MAX_MULTIRUN_BYTES).decode(
                    errors="replace"
                )
                keys.update(SEARCHED_BY_LOGARITHM.findall(text))
        for key in self.keys:
            values = sorted({*known(number(group.config.get(key)) for group in self.groups)})
            doubles = all(b >= 2 * a > 0 for a, b in itertools.pairwise(values))
            if len(values) > 2 and doubles:
                keys.add(key)
        return keys


def read_results(
    directories: Sequence[Path], metric: str | None = None, accept_code: bool = False
) -> Results:
    """Read and compare the jobs in these directories.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        metric: The objective (see `read_jobs`).
        accept_code: Group results together even if the user's code has changed between them.

    Raises:
        RunError: A directory holds no run, or no run has the metric.
    """
    jobs, failures = read_with_failures(directories, metric, accept_code)
    recipes = replicates(jobs)
    groups = recipes if has_replicates(recipes) else singles(jobs)
    objective = jobs[0].ranked_by
    notes = [f"ranked by {objective.title}: {objective.note}"] if objective.note else []
    notes += comparison_notes(jobs) + minutes_notes(groups)
    if changed_code := dict.fromkeys(name for job in jobs for name in job.changed_code):
        notes.append(
            "old code: some results are from before the last change of "
            f"{cut(', '.join(changed_code))}"
        )
    if has_replicates(groups):
        notes += pooling_notes(groups) + diverged_notes((cut(each.name), each) for each in groups)
    for failure in failures:
        times = "once" if failure.count == 1 else f"{failure.count} times"
        notes.append(f"{cut(failure.label)} failed {times}: {cut(failure.reason, MAX_REASON)}")
    notes += best_notes(groups)
    return Results(jobs, groups, varying(groups), notes, [*directories])


def read_with_failures(
    directories: Sequence[Path], metric: str | None = None, accept_code: bool = False
) -> tuple[list[RunRecord], list[JobFailure]]:
    """Read the jobs in these directories, best first, and the recorded failures of their sweeps.

    Args:
        directories: Runs, or parents of runs one or two levels below.
        metric: The objective (see `read_jobs`).
        accept_code: Group results together even if the user's code has changed between them.

    Raises:
        RunError: A directory holds no run, or no run has the metric.
    """
    failures = [failure for each in directories for failure in read_failures(each)]
    failed = {failure.directory for failure in failures}
    jobs = read_jobs([*directories], metric, accept_code)
    if accepts_code(jobs):
        jobs = [replace(job, changed_code=[]) for job in jobs]
    return [_failed(job) if job.directory.name in failed else job for job in jobs], failures


def _failed(job: RunRecord) -> RunRecord:
    """Change the status of a job to "failed", unless it has ended in another way since then."""
    return replace(job, status="failed") if job.status in ("stopped", "unfinished") else job
