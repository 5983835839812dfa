"""The study of a sweep: which values its trials have, how they ended, which are pruned."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.results.optuna_library import optuna
from mingpt_ddp.storage.run_dir import HEADER, JOURNAL
from mingpt_ddp.sweeps.search.journal import Journal
from mingpt_ddp.sweeps.search.optuna_trials import (
    BaseDistribution,
    FrozenTrial,
    TrialState,
    comparable,
    directions,
    distributions_as_json,
    in_memory,
)
from mingpt_ddp.sweeps.search.pruners import Pruning
from mingpt_ddp.sweeps.search.samplers import Drawing
from mingpt_ddp.sweeps.search.study_checks import (
    ANOTHER,
    HEADERS,
    Header,
    check_same_study,
    check_settings,
)

EARLIER = "trials.jsonl"  # the record of earlier versions
FIRST = "first_evaluation"  # attribute of the study: the step of the first one of all


class Study:
    """The trials of the sweep in a directory, which this process has locked.

    Optuna's journal is their only record. A trial is drawn from the seed, its number and the
    results that there are, so that a sweep of one job at a time draws what an undisturbed one
    would. Numbers are positions: of draws, or in the grid. A trial that still runs at a start was
    interrupted: the number finds its values, these its directory.
    """

    def __init__(
        self,
        directory: Path,
        settings: SweepConfig,
        space: Mapping[str, BaseDistribution],
        listed: Sequence[Mapping[str, Any]] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the journal and check that this command continues it; write nothing.

        Args:
            listed: the trials of a grid, in order; None: a search of `space`.
            fixed: values as of JSON that all trials share and that must stay the same.

        Raises:
            ConfigError: a setting is invalid, or belongs to another study.
            RunError: the journal is damaged.
        """
        assert (listed is None) == (settings.sampler is not None)
        check_settings(settings)
        self._settings = settings
        self._directions = directions(settings.objectives)
        self._path = directory / JOURNAL
        self._listed = None if listed is None else [_scalars(values) for values in listed]
        self._header = Header(
            sampler=settings.sampler,
            space={} if self._listed is not None else distributions_as_json(space),
            objectives=list(settings.objectives),
            seed=settings.seed,
            fixed=json.loads(json.dumps(dict(fixed or {}))),
        )
        check(
            not (directory / EARLIER).exists(),
            f"{directory} holds a search of an earlier version, {EARLIER}; {ANOTHER}",
        )
        self._space = dict(space)
        self._load()

    def begin(self) -> None:
        """Write the journal of a new study, or mend that of one that was interrupted.

        Raises:
            ConfigError, RunError: another sweep has just ended that this one cannot continue; the
                directory cannot be written.
        """
        with self._journal.written():
            self._journal.mend()
        self._load()
        if self._journal.is_new:
            self._journal.write(self._directions, {HEADER: asdict(self._header)}, [])
        for trial in self._journal.trials():
            if trial.state == TrialState.RUNNING:
                self._end_if_failed(trial.number)  # a kill has kept that from being recorded

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial by key; draw and record them if it is the next one."""
        if number not in self._numbers:
            self._add(number)
        return dict(self.trial(number).params)

    def trial(self, number: int) -> FrozenTrial:
        """Return a trial that has been drawn."""
        return self._journal.trials()[self._numbers[number]]

    def state(self, number: int) -> TrialState:
        """Return the state of a trial, WAITING before it has been drawn."""
        return self.trial(number).state if number in self._numbers else TrialState.WAITING

    def failures(self, number: int) -> list[str]:
        """Return why a trial has failed, each time."""
        return _failures(self.trial(number)) if number in self._numbers else []

    def report(self, number: int, step: int, value: float) -> str | None:
        """Record an evaluation and return why the trial is pruned after it; None: it goes on.

        A job that was interrupted reports steps again: the recorded decision holds. It is written
        before the evaluation, so that a kill leaves none without its decision.
        """
        trial = self.trial(number)
        has_pruner = self._settings.pruner != "none"
        pruned = trial.user_attrs.get("pruned") if has_pruner else None
        if step not in trial.intermediate_values and not trial.state.is_finished():
            value = comparable(value, self._directions[0])
            if has_pruner and pruned is None:
                pruned = self._judge(trial, step, value)
            self._journal.report(trial.number, step, value)
        return pruned["reason"] if pruned and step >= pruned["step"] else None

    def finish(self, number: int, state: TrialState, values: Sequence[float], job: str) -> None:
        """Record the end of a complete or pruned trial.

        Args:
            values: of the objectives, if it is complete.
            job: the name of its directory.
        """
        trial = self.trial(number)
        pairs = zip(values, self._directions, strict=True) if values else ()
        plain = [comparable(value, direction) for value, direction in pairs]
        if state == TrialState.PRUNED and trial.last_step is not None:
            plain = [trial.intermediate_values[trial.last_step]]
        self._journal.set(trial.number, "job", job)
        self._journal.end(trial.number, state, plain or None)

    def fail(self, number: int, reason: str) -> None:
        """Record a failure, which ends the trial if no retry is left."""
        index = self._numbers[number]
        self._journal.set(index, "failures", [*self.failures(number), reason])
        self._end_if_failed(index)

    def match(self, number: int, job: str) -> None:
        """Let a trial of a grid continue the record of its job, if there is another one.

        That has the values of other keys if another one varies now.

        Args:
            job: the name of its directory.
        """
        if self._listed is None:
            return
        trials = copy.deepcopy(self._journal.trials())
        added = trials[self._numbers[number]]
        others = [trial for trial in trials if trial.user_attrs.get("job") == job]
        kept = next((trial for trial in others if trial.number != added.number), None)
        if kept is None:
            return
        if kept.number not in self._numbers.values():  # else of the same job under another number
            kept.params = added.params
            kept.distributions = added.distributions
        del trials[added.number]
        self._journal.write(self._directions, self._journal.attributes, trials)
        for each, index in self._numbers.items():
            before = kept.number if index == added.number else index
            self._numbers[each] = before - (before > added.number)

    def reopen(self, number: int) -> None:
        """Let a finished trial run again; if it was pruned, past that step.

        Optuna forbids it, so the journal is replaced.
        """
        trials = copy.deepcopy(self._journal.trials())
        trial = trials[self._numbers[number]]
        if trial.state != TrialState.FAIL:
            trial.user_attrs.pop("failures", None)
        trial.state = TrialState.RUNNING
        trial.values = None
        trial.datetime_complete = None
        pruned = trial.user_attrs.pop("pruned", None)
        if pruned is not None:
            trial.intermediate_values.pop(pruned["step"], None)
        self._journal.write(self._directions, self._journal.attributes, trials)

    def _end_if_failed(self, index: int) -> None:
        if len(_failures(self._journal.trials()[index])) > self._settings.retries:
            self._journal.end(index, TrialState.FAIL)

    def _judge(self, trial: FrozenTrial, step: int, value: float) -> dict[str, Any] | None:
        """Return the decision to prune a trial, which has been recorded; None: it goes on."""
        first = self._journal.attributes.get(FIRST)
        if first is None:
            first = step
            self._journal.set_of_study(FIRST, step)
        settings = self._settings
        given = settings.pruner_settings or {}
        pruning = Pruning(settings.pruner, given, settings.objectives[0], first)
        decision = pruning.decide(self._journal.trials(), trial, step, value)
        if decision is None:
            return None
        self._journal.set(trial.number, "pruned", asdict(decision))
        return asdict(decision)

    def _add(self, number: int) -> None:
        """Record a trial, in one line, before its job begins."""
        trials = self._journal.trials()
        if self._listed is not None:
            params = self._listed[number]
        else:
            assert number == len(trials), f"trial {number} is not the next one, {len(trials)}"
            params = self._draw(trials)
        trial = optuna.create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions={key: self._space[key] for key in params},
        )
        self._journal.add(trial)
        self._numbers[number] = len(trials)

    def _draw(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        assert self._settings.sampler is not None
        drawing = Drawing(
            self._settings.sampler,
            self._settings.sampler_settings or {},
            self._settings.seed,
            self._space,
            self._directions,
        )
        return drawing.draw(trials)

    def _load(self) -> None:
        self._journal = self._read()
        if self._listed is not None:
            self._space = self._grid_space(self._listed)
        self._numbers = self._match_listed()

    def _read(self) -> Journal:
        """Read the journal, and check that this command continues it."""
        try:
            journal = Journal(self._path)
            if journal.is_new:
                return journal
            header = HEADERS.validate_json(json.dumps(journal.attributes[HEADER]))
            in_memory(directions(header.objectives), journal.trials())  # checks the values
            if not all(_is_name(trial.user_attrs.get("job", "-")) for trial in journal.trials()):
                raise ValueError("a job is not a directory of the sweep")
        except Exception as error:  # of the system, of Optuna, of pydantic
            what = (
                f"cannot be read: {reason(error)}" if isinstance(error, OSError) else "is damaged"
            )
            raise RunError(
                f"{self._path} {what}; move it away to begin a new study, or {ANOTHER}"
            ) from error
        check_same_study(header, self._header)
        return journal

    def _match_listed(self) -> dict[int, int]:
        """Return the indices of the recorded trials by number.

        The list of a grid may have changed: a trial keeps its record, found by its values.
        """
        trials = self._journal.trials()
        if self._listed is None:
            return {i: i for i in range(len(trials))}
        recorded: dict[frozenset[tuple[str, Any]], int] = {}
        for trial in trials:
            recorded.setdefault(frozenset(trial.params.items()), trial.number)
        found = {
            number: recorded.get(frozenset(each.items()))
            for number, each in enumerate(self._listed)
        }
        return {number: index for number, index in found.items() if index is not None}

    def _grid_space(self, listed: Sequence[Mapping[str, Any]]) -> dict[str, BaseDistribution]:
        """Return, for Optuna's tools, the values of each key that the trials have or had."""
        values: dict[str, list[Any]] = {}
        for params in [*(each.params for each in self._journal.trials()), *listed]:
            for key, value in params.items():
                choices = values.setdefault(key, [])
                if value not in choices:
                    choices.append(value)
        return {
            key: optuna.distributions.CategoricalDistribution(choices)
            for key, choices in values.items()
        }


def _failures(trial: FrozenTrial) -> list[str]:
    failures: list[str] = trial.user_attrs.get("failures", [])
    return failures


def _is_name(text: Any) -> bool:
    """Return whether a text can only name something in a directory itself."""
    return isinstance(text, str) and text not in (".", "..") and not {"/", "\0"} & {*text}


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that Optuna can hold: lists and mappings as JSON."""
    plain = (bool, int, float, str, type(None))
    return {k: v if isinstance(v, plain) else json.dumps(v) for k, v in values.items()}
