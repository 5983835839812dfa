"""The study of a sweep: which values its trials have, how they ended, which are pruned."""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import RunError, counted, reason
from mingpt_ddp.results.objective import objective_named
from mingpt_ddp.results.optuna_library import optuna
from mingpt_ddp.storage.run_directory import HEADER, JOURNAL, RESULT
from mingpt_ddp.sweeps.search.journal import Journal
from mingpt_ddp.sweeps.search.methods import pruner_settings, sampler_settings
from mingpt_ddp.sweeps.search.optuna_trials import (
    BaseDistribution,
    FrozenTrial,
    TrialState,
    direction,
    distributions_as_json,
    in_memory,
)
from mingpt_ddp.sweeps.search.pruners import Pruning
from mingpt_ddp.sweeps.search.study_checks import (
    ANOTHER,
    HEADERS,
    Header,
    check_same_study,
)
from mingpt_ddp.sweeps.search.trial_values import draw

EARLIER = "trials.jsonl"  # the record of earlier versions


class Study:
    """The trials of the sweep in a directory, which this process has locked.

    Optuna's journal is their only record. A trial is drawn from the seed, its number and the
    results that there are, so that a sweep of one job at a time draws what an undisturbed one
    would. A trial that still runs at a start was interrupted: in a search its number finds its
    values, these its directory; in a grid the directory finds the trial.
    """

    def __init__(
        self,
        directory: Path,
        settings: SweepConfig,
        space: Mapping[str, BaseDistribution],
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the journal and check that this command continues it; write nothing.

        Args:
            space: The space of a search, or the values of each key of a grid.
            fixed: JSON values that all trials share and that must stay the same.

        Raises:
            ConfigError: A setting is invalid or belongs to another study, or the journal is gone.
            RunError: the journal is damaged.
        """
        sampler_settings(settings)  # checks them
        pruner_settings(settings)
        self._settings = settings
        self._objective = objective_named(settings.metric)
        self._direction = direction(self._objective)
        self._path = directory / JOURNAL
        self._header = Header(
            sampler=settings.sampler,
            space=distributions_as_json(space) if settings.sampler else {},
            metric=self._objective.metric,
            seed=settings.seed,
            fixed=json.loads(json.dumps(dict(fixed or {}))),
        )
        check(
            not (directory / EARLIER).exists(),
            f"{directory} holds a search of an earlier version, {EARLIER}; {ANOTHER}",
        )
        self._space = dict(space)
        self._journal = self._read()
        if settings.sampler and self._journal.is_new:
            ended = len([*directory.glob(f"*/{RESULT}")])
            check(
                not ended,
                f"{self._path} is missing or empty, and {counted(ended, 'job')} of its search have "
                f"ended; restore it, or {ANOTHER}",
            )

    def begin(self) -> None:
        """Write the journal of a new study, or repair that of one that was interrupted.

        Raises:
            ConfigError, RunError: another sweep has just ended that this one cannot continue; the
                directory cannot be written.
        """
        with self._journal.written():
            self._journal.repair()
        self._journal = self._read()
        if self._journal.is_new:
            self._journal.write(self._direction, {HEADER: asdict(self._header)}, [])

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial of a search; draw and record them if it is the next one."""
        trials = self._journal.trials()
        assert number <= len(trials), f"trial {number} is not the next one, {len(trials)}"
        if number == len(trials):
            self._add(draw(self._settings, self._space, trials))
        return dict(self.trial(number).params)

    def number_of(self, job: str, params: Mapping[str, Any]) -> int:
        """Return the number of the trial of a job of a grid; record it if there is none.

        Other keys may vary than when it was recorded.

        Args:
            job: the name of its directory.
            params: its values.
        """
        for trial in self._journal.trials():
            if trial.user_attrs.get("job") == job:
                return trial.number
        self._add(params, job=job)
        return len(self._journal.trials()) - 1

    def trial(self, number: int) -> FrozenTrial:
        """Return a trial that has been recorded."""
        return self._journal.trials()[number]

    def state(self, number: int) -> TrialState:
        """Return the state of a trial, WAITING before it has been recorded."""
        has_begun = number < len(self._journal.trials())
        return self.trial(number).state if has_begun else TrialState.WAITING

    def report(self, number: int, step: int, value: float) -> str | None:
        """Record an evaluation and return why the trial is pruned after it; None: it goes on.

        A job that was interrupted reports steps again: the recorded decision holds. It is written
        before the evaluation, so that a kill leaves none without its decision.
        """
        trial = self.trial(number)
        has_pruner = self._settings.pruner != "none"
        pruned = trial.user_attrs.get("pruned") if has_pruner else None
        if step not in trial.intermediate_values and not trial.state.is_finished():
            value = value if math.isfinite(value) else self._objective.cost(math.inf)
            if has_pruner and pruned is None:
                pruned = self._judge(trial, step, value)
            self._journal.report(trial.number, step, value)
        return pruned["reason"] if pruned and step >= pruned["step"] else None

    def finish(self, number: int, state: TrialState, value: float | None, job: str) -> None:
        """Record the end of a complete or pruned trial.

        Args:
            value: Finite value of the metric if the trial is complete.
            job: the name of its directory.
        """
        trial = self.trial(number)
        if state == TrialState.PRUNED and trial.last_step is not None:
            value = trial.intermediate_values[trial.last_step]
        self._journal.set(number, "job", job)
        self._journal.end(number, state, value)

    def fail(self, number: int) -> None:
        """End a trial that has failed."""
        self._journal.end(number, TrialState.FAIL)

    def reopen(self, number: int) -> None:
        """Let a finished trial run again; if it was pruned, past that step.

        Optuna forbids it, so the journal is replaced.
        """
        trials = copy.deepcopy(self._journal.trials())
        trial = trials[number]
        trial.state = TrialState.RUNNING
        trial.values = None
        trial.datetime_complete = None
        pruned = trial.user_attrs.pop("pruned", None)
        if pruned is not None:
            trial.intermediate_values.pop(pruned["step"], None)
        self._journal.write(self._direction, self._journal.attributes, trials)

    def _judge(self, trial: FrozenTrial, step: int, value: float) -> dict[str, Any] | None:
        """Return the decision to prune a trial, which has been recorded; None: it goes on."""
        trials = self._journal.trials()
        first = next((min(t.intermediate_values) for t in trials if t.intermediate_values), step)
        decision = Pruning(self._settings, first).decide(trials, trial, step, value)
        if decision is None:
            return None
        self._journal.set(trial.number, "pruned", asdict(decision))
        return asdict(decision)

    def _add(self, params: Mapping[str, Any], **attributes: str) -> None:
        """Record a trial, in one line, before its job begins."""
        trial = optuna.create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions={key: self._space[key] for key in params},
            user_attrs=attributes,
        )
        self._journal.add(trial)

    def _read(self) -> Journal:
        """Read the journal, and check that this command continues it."""
        try:
            journal = Journal(self._path)
            if journal.is_new:
                return journal
            header = HEADERS.validate_json(json.dumps(journal.attributes[HEADER]))
            in_memory(direction(objective_named(header.metric)), journal.trials())  # checks values
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


def _is_name(text: Any) -> bool:
    """Return whether a text can only name something in a directory itself."""
    return isinstance(text, str) and text not in (".", "..") and not {"/", "\0"} & {*text}
