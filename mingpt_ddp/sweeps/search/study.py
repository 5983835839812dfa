"""The study of a sweep: which values its trials have, how they ended, which are pruned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mingpt_ddp.config.sweep_config import SweepConfig
from mingpt_ddp.errors import RunError
from mingpt_ddp.results.optuna_library import optuna
from mingpt_ddp.storage.run_dir import TRIALS
from mingpt_ddp.sweeps.search.optuna_trials import (
    BaseDistribution,
    FrozenTrial,
    comparable,
    directions,
    distributions_as_json,
    frozen_trial,
)
from mingpt_ddp.sweeps.search.pruners import Pruning
from mingpt_ddp.sweeps.search.records import (
    Drawn,
    Finished,
    Header,
    Records,
    Reopened,
    Reported,
    TrialRecord,
    now,
    number_of,
)
from mingpt_ddp.sweeps.search.samplers import Drawing
from mingpt_ddp.sweeps.search.study_checks import ANOTHER, check_same_study, check_settings
from mingpt_ddp.sweeps.search.study_storage import StudyStorage


@dataclass(frozen=True)
class Trial:
    """The values of a job, by key."""

    number: int
    values: dict[str, Any]


class Outcome(str, Enum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class Study:
    """The trials of the sweep in a directory, which this process has locked.

    A trial is drawn from the seed, its number and the results that there are, so that a sweep of
    one job at a time draws what an undisturbed one would. Numbers are positions: of draws, or in
    the grid.
    """

    def __init__(
        self,
        directory: Path,
        settings: SweepConfig,
        space: Mapping[str, BaseDistribution],
        listed: Sequence[Mapping[str, Any]] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the records and check that this command continues them; write nothing.

        Args:
            listed: the trials of a grid, in order; None: a search of `space`.
            fixed: values as of JSON that all trials share and that must stay the same.

        Raises:
            ConfigError: a setting is invalid, or belongs to another study.
            RunError: the records are damaged.
        """
        assert (listed is None) == (settings.sampler is not None)
        check_settings(settings)
        self._settings = settings
        self._directions = directions(settings.objectives)
        self._records = Records(directory / TRIALS)
        self._listed = None if listed is None else [_scalars(values) for values in listed]
        self._numbers = self._match_listed()
        self._distributions = dict(space) if self._listed is None else self._grid_space()
        header = self._records.header
        self._header = Header(
            sampler=settings.sampler,
            space={} if self._listed is not None else distributions_as_json(space),
            objectives=list(settings.objectives),
            seed=settings.seed,
            fixed=json.loads(json.dumps(dict(fixed or {}))),
        )
        if header is not None:
            check_same_study(header, self._header)
        self._check_values()
        self._storage = StudyStorage(directory, self._directions, self._all_frozen)
        self._pruning: Pruning | None = None
        if settings.pruner != "none":
            given = settings.pruner_settings or {}
            self._pruning = Pruning(settings.pruner, given, settings.objectives[0], self._records)

    def begin(self) -> None:
        """Write the header of a new study, or repair the files of one that was interrupted.

        Raises:
            RunError: the directory cannot be written.
        """
        self._records.begin(self._header)
        self._storage.open()

    def trial(self, number: int) -> Trial:
        """Return the values of a trial; draw and record them if it is the next one."""
        if number not in self._numbers:
            self._add(number)
        return Trial(number, dict(self._record(number).params))

    def outcome(self, number: int) -> Outcome | None:
        """Return how a trial ended; None: it has not."""
        if number not in self._numbers:
            return None
        outcome = self._record(number).outcome
        return None if outcome is None else Outcome(outcome)

    def failures(self, number: int) -> int:
        """Return how often a trial has failed."""
        return self._record(number).failures if number in self._numbers else 0

    def reason(self, number: int) -> str:
        """Return why a trial failed."""
        return self._record(number).reason

    def job(self, number: int) -> str:
        """Return the name of the directory of a finished trial."""
        return self._record(number).job

    def values(self, number: int) -> list[float]:
        """Return the objectives of a finished trial."""
        return [*self._record(number).values]

    def report(self, number: int, step: int, value: float) -> str | None:
        """Record an evaluation and return why the trial is pruned after it; None: it goes on.

        A job that was interrupted reports steps again: the recorded decision holds.
        """
        record = self._record(number)
        pruned = None if self._pruning is None else record.pruned
        if step in record.reports:
            return pruned and record.reports[step].pruned
        if record.outcome is not None or pruned:
            return pruned
        if self._pruning is not None:
            pruned = self._pruning.decide(record.number, step, value)
        line = Reported(trial=record.number, step=step, value=number_of(value), pruned=pruned)
        self._records.append(line)
        self._storage.report(record.number, step, comparable(value, self._directions[0]))
        return pruned

    def finish(
        self,
        number: int,
        outcome: Outcome,
        values: Sequence[float] = (),
        reason: str = "",
        job: str = "",
    ) -> None:
        """Record how a trial ended.

        Args:
            values: of the objectives, if it is complete.
            reason: why it was pruned or failed.
            job: the name of its directory.
        """
        record = self._record(number)
        self._records.append(
            Finished(
                trial=record.number,
                outcome=outcome.value,
                values=[number_of(value) for value in values],
                reason=reason,
                job=job,
                time=now(),
            )
        )
        if self._pruning is not None:
            self._pruning.finish(record.number, outcome.value)
        self._storage.finish(self._frozen(record))

    def reopen(self, number: int) -> None:
        """Record that a finished trial runs again; if it was pruned, past that step."""
        record = self._record(number)
        self._records.append(Reopened(trial=record.number))
        if self._pruning is not None:
            self._pruning.repeat()
        self._storage.rewrite()

    def trials(self) -> list[TrialRecord]:
        """Return all recorded trials, with the numbers that Optuna's tools show."""
        return list(self._records.trials)

    def _record(self, number: int) -> TrialRecord:
        return self._records.trials[self._numbers[number]]

    def _add(self, number: int) -> None:
        """Record a trial before its job begins."""
        index = len(self._records.trials)
        if self._listed is not None:
            params = self._listed[number]
        else:
            assert number == index, f"trial {number} is not the next one, {index}"
            params = self._draw()
        self._records.append(Drawn(trial=index, params=params, time=now()))
        self._numbers[number] = index
        if self._pruning is not None:
            self._pruning.add_trial()
        self._storage.create(self._frozen(self._records.trials[index]))

    def _draw(self) -> dict[str, Any]:
        assert self._settings.sampler is not None
        drawing = Drawing(
            self._settings.sampler,
            self._settings.sampler_settings or {},
            self._settings.seed,
            self._distributions,
            self._directions,
        )
        return drawing.draw(self._all_frozen())

    def _frozen(self, record: TrialRecord) -> FrozenTrial:
        return frozen_trial(record, self._distributions, self._directions)

    def _all_frozen(self) -> list[FrozenTrial]:
        return [self._frozen(record) for record in self._records.trials]

    def _match_listed(self) -> dict[int, int]:
        """Return the indices of the recorded trials by number.

        The list of a grid may have changed: a trial keeps its record, found by its values.
        """
        if self._listed is None:
            return {i: i for i in range(len(self._records.trials))}
        recorded: dict[str, int] = {}
        for record in self._records.trials:
            recorded.setdefault(_key(record.params), record.number)
        found = {number: recorded.get(_key(each)) for number, each in enumerate(self._listed)}
        return {number: index for number, index in found.items() if index is not None}

    def _grid_space(self) -> dict[str, BaseDistribution]:
        """Return, for Optuna's tools, the values of each key that the trials have or had."""
        values: dict[str, list[Any]] = {}
        for params in [*(each.params for each in self._records.trials), *(self._listed or [])]:
            for key, value in params.items():
                choices = values.setdefault(key, [])
                if value not in choices:
                    choices.append(value)
        return {
            key: optuna.distributions.CategoricalDistribution(choices)
            for key, choices in values.items()
        }

    def _check_values(self) -> None:
        for record in self._records.trials:
            try:
                if self._listed is None and record.params.keys() != self._distributions.keys():
                    raise ValueError("other keys")
                self._frozen(record)
            except (ValueError, TypeError, OverflowError, KeyError, OSError) as error:
                raise RunError(
                    f"{self._records.path}: the values of trial {record.number} are damaged; move "
                    f"the file away to begin a new study, or {ANOTHER}"
                ) from error


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that Optuna can hold: lists and mappings as JSON."""
    plain = (bool, int, float, str, type(None))
    return {k: v if isinstance(v, plain) else json.dumps(v) for k, v in values.items()}


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)
