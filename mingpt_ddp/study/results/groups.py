"""Group the jobs that differ only in `run.seed`. They are replicates of one recipe."""

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from mingpt_ddp.config.config import effect_of
from mingpt_ddp.storage.code_identity import recorded_code
from mingpt_ddp.study.results.objective import Objective
from mingpt_ddp.study.results.runs import (
    ACCEPT_CODE,
    DIVERGED,
    Row,
    RunRecord,
    Value,
    by_objective,
    grouped,
    identity,
    known,
    number,
    varying,
)
from mingpt_ddp.study.results.stats.intervals import Estimate, estimate
from mingpt_ddp.study.results.stats.significance import MIN_PAIRS

SEED = "run.seed"
# Parts of a job's name that differ between replicates in a sweep: its seed, and a hash.
SEED_IN_NAME = re.compile(r"(?<=run\.seed=)\d+|(?<=-)[0-9a-f]{8}$")
Recipe = tuple[tuple[str, Hashable], ...]  # keys that determine the results, and their values


@dataclass(frozen=True)
class Group:
    """Jobs of one recipe with different seeds. A single job is a group, too."""

    jobs: list[RunRecord]  # at least one job, in the order of `read_jobs`
    config: dict[str, Value]  # keys that determine the results and are shared, without run.seed

    @property
    def first(self) -> RunRecord:
        """The job whose command line a report shows for the group."""
        return self.jobs[0]

    @property
    def ranked_by(self) -> Objective:
        return self.first.ranked_by

    @property
    def status(self) -> str:
        """The different statuses of the jobs. Results of old code are marked."""
        marked = (
            f"{job.status}, old code" if job.changed_code else job.status for job in self.jobs
        )
        return ", ".join(dict.fromkeys(marked))

    @cached_property
    def samples(self) -> list[RunRecord]:
        """One job for each seed. If any job is complete, only complete jobs count."""
        jobs = [job for job in self.jobs if job.objective is not None] or self.jobs
        return [*{seed_of(job): job for job in reversed(jobs)}.values()][::-1]

    @cached_property
    def name(self) -> str:
        """A pattern that matches all names of jobs, such as run.seed=*, or the first job's name."""
        patterns = {SEED_IN_NAME.sub("*", job.name) for job in self.jobs}
        return patterns.pop() if len(patterns) == 1 < len(self.jobs) else self.first.name

    @property
    def n_seeds(self) -> int:
        """Number of different seeds."""
        return len({seed_of(job) for job in self.jobs})

    @property
    def n_complete(self) -> int:
        """Number of seeds with a complete job that has an objective."""
        return self.estimate.n

    @property
    def diverged(self) -> list[str]:
        """The seeds of the jobs whose loss is not finite."""
        seeds = [seed_of(job) for job in self.jobs if job.status == DIVERGED]
        return [*dict.fromkeys(seeds)]

    @property
    def seed_count(self) -> str:
        """The number of seeds as text, such as `3/5, 2 diverged` if three of five are complete."""
        count = (
            f"{self.n_seeds}"
            if self.n_complete == self.n_seeds
            else f"{self.n_complete}/{self.n_seeds}"
        )
        return f"{count}, {len(self.diverged)} diverged" if self.diverged else count

    @property
    def by_seed(self) -> dict[str, float]:
        """The mean objective of the complete jobs of each seed."""
        return means_by_seed(self.jobs, lambda job: job.objective)

    @property
    def costs(self) -> dict[str, float]:
        """The objective of each seed as a cost: lower is better."""
        return {seed: self.ranked_by.cost(value) for seed, value in self.by_seed.items()}

    @cached_property
    def estimate(self) -> Estimate:
        """The mean objective of the complete jobs, with its interval."""
        return self.estimate_of(lambda job: job.objective)

    @cached_property
    def latest(self) -> Estimate:
        """The estimate of the mean objective, or of the last values if no job is complete."""
        return self.estimate if self.n_complete else self.estimate_of(lambda job: job.value)

    @property
    def speed(self) -> float | None:
        """The median speed of the jobs, in tokens or samples per second."""
        speeds = known(job.metrics.speed for job in self.jobs)
        return statistics.median(speeds) if speeds else None

    @property
    def faults(self) -> int | None:
        """The sum of the faults of all jobs."""
        faults = known(job.metrics.faults for job in self.jobs)
        return sum(faults) if faults else None

    @property
    def seconds(self) -> float | None:
        """The sum of the training times of all jobs."""
        times = known(number(job.result.get("wall_seconds")) for job in self.jobs)
        return sum(times) if times else None

    @property
    def minutes(self) -> float | None:
        """Mean time in minutes that the steps of a complete job took.

        Only runs with trainer.max_minutes record this time.
        """
        complete = [job for job in self.jobs if job.status == "complete"]
        times = known(number(job.result.get("minutes")) for job in complete)
        return statistics.fmean(times) if times else None

    @property
    def objective(self) -> float | None:
        """The mean objective of the complete jobs."""
        return self.estimate.mean

    @property
    def value(self) -> float | None:
        """The mean objective, or the mean of the last values if no job is complete."""
        return self.latest.mean

    def estimate_of(self, measure: Callable[[RunRecord], float | None]) -> Estimate:
        """Estimate the mean of a measurement over the seeds that have it.

        If a seed has diverged, the estimate has the number of seeds but no mean: the remaining
        seeds would be a biased selection.

        Args:
            measure: Returns the measurement of a job, or None if the job has none.
        """
        values = [*means_by_seed(self.jobs, measure).values()]
        return Estimate(len(values)) if self.diverged else estimate(values)


G = TypeVar("G", bound=Group)


def replicates(jobs: Iterable[RunRecord]) -> list[Group]:
    """Group the jobs that differ only in `run.seed`. Sort the groups by their mean objective.

    Groups without a mean come last.

    Some keys change at most the last bits of a result: where files are, how ranks share the work,
    what is logged. They do not separate groups unless they were swept, which means that jobs of one
    recipe differ in them for two seeds or more. Jobs that were trained on different texts, or by
    different versions of the user's files, are separate groups. Their parameters `text` and `code`
    tell them apart.
    """
    jobs = [*jobs]
    swept = _swept(jobs)
    by_recipe = grouped(jobs, lambda job: _recipe(job, swept) or job.directory)
    groups = []
    for members in by_recipe.values():
        config = members[0].config
        shared = {key: config[key] for key in _keys(members[0], swept)}
        for apart, part in _by_inputs(members):
            groups.append(Group(part, {**shared, **apart}))
    return sorted(groups, key=by_objective)


def _by_inputs(jobs: list[RunRecord]) -> Iterator[tuple[dict[str, Value], list[RunRecord]]]:
    """Divide jobs of one recipe by the text and the user's code that they were trained with.

    A job that is not complete may have recorded neither. It joins the other jobs if they all have
    the same text and code.

    Yields:
        The values of the parameters `text` and `code`, if they differ, and the jobs.
    """
    are_accepted = accepts_code(jobs)

    def inputs(job: RunRecord) -> tuple[str | None, str] | None:
        if not recorded_code(job.result):
            return None
        return text_of(job), "" if are_accepted else job.code

    parts = grouped(jobs, inputs)
    known = [key for key in parts if key is not None]
    if len(known) < 2:
        yield {}, jobs
        return
    differ = [len({*values}) > 1 for values in zip(*known, strict=True)]
    for key, part in parts.items():
        named = zip(("text", "code"), key, strict=True) if key else ()
        yield dict(itertools.compress(named, differ)), part


def text_of(job: RunRecord) -> str | None:
    """Return the first digits of the SHA-256 of a job's data. Return None if it is unknown."""
    recorded = job.result.get("data")
    sha256 = recorded.get("sha256") if isinstance(recorded, dict) else None
    sha256 = sha256 or job.config.get("data.sha256")
    return sha256[:12] if isinstance(sha256, str) else None


def accepts_code(jobs: Iterable[RunRecord]) -> bool:
    """Return True if any job has run.accept_code=true. Then the code does not separate groups."""
    return any(job.config.get(ACCEPT_CODE) is True for job in jobs)


def has_replicates(groups: Iterable[Group]) -> bool:
    """Return True if a group has several seeds."""
    return any(group.n_seeds > 1 for group in groups)


def singles(jobs: Iterable[RunRecord]) -> list[Group]:
    """Make a group of each job, with all keys of the job."""
    return [Group([job], job.config) for job in jobs]


def best_group(groups: Sequence[G]) -> G | None:
    """Choose the group with the best mean objective. Return None if no group has a mean.

    If the groups that `rivals_of` returns share MIN_PAIRS seeds or more, their means over the
    shared seeds decide. Otherwise the mean over all seeds of each group decides.

    Args:
        groups: Groups in the order in which `replicates` returns them.
    """
    rivals = rivals_of(groups)
    seeds = shared_seeds(rivals)
    if len(seeds) < MIN_PAIRS:
        return rivals[0] if rivals else None
    means = [statistics.fmean(map(group.costs.__getitem__, seeds)) for group in rivals]
    return rivals[means.index(min(means))]


def rivals_of(groups: Sequence[G]) -> list[G]:
    """Return the groups that can be the best group.

    Groups with a diverged seed have no mean, so they are left out. If any group has two complete
    seeds or more, groups with one complete seed are left out too.
    """
    ranked = [group for group in groups if group.objective is not None]
    return [group for group in ranked if group.n_complete > 1] or ranked


def shared_seeds(groups: Sequence[Group]) -> list[str]:
    """Return the seeds that are complete in all groups."""
    common = set.intersection(*({*group.by_seed} for group in groups)) if groups else set[str]()
    return sorted(common)


def _makes_results(job: RunRecord, key: str) -> bool:
    """Return True if a key changes the final loss of a job by more than its last bits."""
    if key == "trainer.eval_steps":  # it chooses the windows on which the loss is measured
        return True
    if key == "trainer.eval_every":  # patience counts evaluations
        return job.config.get("trainer.patience") is not None
    return key != SEED and effect_of(key) in ("training", "end")


def _swept(jobs: list[RunRecord]) -> set[str]:
    """Find the keys in which jobs with the same recipe and seed differ, for two seeds or more."""
    swept = set()
    for members in grouped(jobs, lambda job: _recipe(job, set())).values():
        seeds = Counter[str]()  # number of seeds by key
        for same in grouped(members, seed_of).values():
            seeds.update(varying(same))
        swept |= {key for key, count in seeds.items() if count > 1}
    return swept


def _keys(job: RunRecord, swept: set[str]) -> list[str]:
    """List the keys that belong to the recipe of a job."""
    return [key for key in job.config if key in swept or _makes_results(job, key)]


def _recipe(job: RunRecord, swept: set[str]) -> Recipe:
    return recipe(job, sorted(_keys(job, swept)))


def recipe(row: Row, keys: Iterable[str]) -> Recipe:
    """Return a hashable key. Rows with equal values of these keys have equal recipes."""
    return tuple((key, identity(row.config[key])) for key in keys)


def means_by_seed(
    jobs: Iterable[RunRecord], measure: Callable[[RunRecord], float | None]
) -> dict[str, float]:
    """Return the mean of a measurement for each seed that has it.

    Jobs with the same seed are not independent samples, so their mean counts once.
    """
    means = {}
    for seed, same in grouped(jobs, seed_of).items():
        if values := known(map(measure, same)):
            means[seed] = statistics.fmean(values)
    return means


def seed_of(job: RunRecord) -> str:
    """Return the seed of a job as JSON, or its directory if it has recorded none."""
    return json.dumps(job.config[SEED]) if SEED in job.config else str(job.directory)
