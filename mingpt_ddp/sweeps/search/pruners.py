"""The pruners of a sweep by name, and their decisions in words."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.sweeps.search.optuna_trials import STATES, StudyDirection, TrialState, comparable
from mingpt_ddp.sweeps.search.records import Records
from mingpt_ddp.sweeps.search.samplers import Setting, Table, with_defaults

PRUNERS: Table = {
    "none": {},
    "median": {
        "n_startup_trials": Setting(5),
        "n_warmup_steps": Setting(0),
        "interval_steps": Setting(1, lowest=1),
        "n_min_trials": Setting(1, lowest=1),
    },
    "asha": {
        "min_resource": Setting(None, lowest=1),  # the step of the first evaluation of all
        "reduction_factor": Setting(3, lowest=2),
        "min_early_stopping_rate": Setting(0),
        "bootstrap_count": Setting(0),
    },
}
# Not infinite: NumPy's median of two infinite numbers is NaN.
WORST = 1e300
RUNG = "completed_rung_"  # begins Optuna's attribute of a trial for a rung that it has reached
BEST_PART = {2: "half", 3: "third", 4: "quarter", 5: "fifth"}


def check_pruner(name: str, given: Mapping[str, Any]) -> None:
    """Check the settings of a pruner.

    Raises:
        ConfigError: one is unknown or invalid.
    """
    with_defaults(PRUNERS, "pruner", name, given)


class Pruning:
    """Optuna's pruner on a study in memory, which repeats what the records say."""

    def __init__(
        self, name: str, given: Mapping[str, Any], objective: str, records: Records
    ) -> None:
        self._name = name
        self._settings = with_defaults(PRUNERS, "pruner", name, given)
        self._objective = objective
        self._records = records
        self._pruner: optuna.pruners.BasePruner | None = None
        self.repeat()

    def repeat(self) -> None:
        """Build the study from the records."""
        maximize = self._objective.startswith("-")
        self._direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
        self._storage = optuna.storages.InMemoryStorage()
        study_id = self._storage.create_new_study([self._direction], "pruning")
        with no_warnings():
            self._study = optuna.load_study(
                study_name="pruning",
                storage=self._storage,
                sampler=optuna.samplers.RandomSampler(0),
                pruner=optuna.pruners.NopPruner(),
            )
        self._study_id = study_id
        self._ids: list[int] = []
        for _ in self._records.trials:
            self.add_trial()
        for number, step in self._records.reports:
            self._prunes(number, step, self._records.trials[number].reports[step].value)
        for trial in self._records.trials:
            if trial.outcome:
                self.finish(trial.number, trial.outcome)

    def add_trial(self) -> None:
        """Add the next trial."""
        self._ids.append(self._storage.create_new_trial(self._study_id))

    def finish(self, number: int, outcome: str) -> None:
        """Finish a trial; of its result a pruner reads the state alone."""
        values = [0.0] if outcome == "complete" else None
        self._storage.set_trial_state_values(self._ids[number], STATES[outcome], values)

    def decide(self, number: int, step: int, value: float) -> str | None:
        """Return why a trial is pruned after an evaluation; None: it goes on."""
        if not self._prunes(number, step, value):
            return None
        return self._why_median(number, step) if self._name == "median" else self._why_asha(number)

    def _prunes(self, number: int, step: int, value: float) -> bool:
        value = comparable(value, self._direction)
        value = min(max(value, -WORST), WORST)
        self._storage.set_trial_intermediate_value(self._ids[number], step, value)
        trial = self._storage.get_trial(self._ids[number])
        if trial.last_step != step:  # an evaluation before one that has been judged
            return False
        with no_warnings():
            return self._pruner_from(step).prune(self._study, trial)

    def _pruner_from(self, step: int) -> optuna.pruners.BasePruner:
        if self._pruner is not None:
            return self._pruner
        if self._name == "median":
            self._pruner = optuna.pruners.MedianPruner(**self._settings)
            return self._pruner
        first = self._records.reports[0][1] if self._records.reports else step
        settings = dict(self._settings)
        settings["min_resource"] = settings["min_resource"] or max(first, 1)
        self._pruner = optuna.pruners.SuccessiveHalvingPruner(**settings)
        return self._pruner

    def _why_median(self, number: int, step: int) -> str:
        reports = self._storage.get_trial(self._ids[number]).intermediate_values.values()
        others = [
            trial.intermediate_values[step]
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if step in trial.intermediate_values
        ]
        is_max = self._direction == StudyDirection.MAXIMIZE
        best = max(reports) if is_max else min(reports)
        side = "below" if is_max else "above"
        median = statistics.median(others)
        return (
            f"{self._title} {_text(best)} is {side} the median {_text(median)} of {len(others)} "
            f"{_jobs(len(others))} at step {step}"
        )

    def _why_asha(self, number: int) -> str:
        trial = self._storage.get_trial(self._ids[number])
        rung = sum(key.startswith(RUNG) for key in trial.system_attrs)
        trials: Sequence[Any] = self._study.get_trials(deepcopy=False)
        count = sum(f"{RUNG}{rung - 1}" in other.system_attrs for other in trials)
        factor = self._settings["reduction_factor"]
        part = BEST_PART.get(factor, f"1/{factor}")
        return (
            f"not among the best {part} of {count} {_jobs(count)} at rung {rung}, "
            f"step {trial.last_step}"
        )

    @property
    def _title(self) -> str:
        name = self._objective.removeprefix("-")
        return {"val_loss": "validation loss"}.get(name, name)


def _jobs(count: int) -> str:
    return "job" if count == 1 else "jobs"


def _text(value: float) -> str:
    """Return a number to four digits after the point, or say that it was not finite."""
    if abs(value) >= WORST or not math.isfinite(value):
        return "(not finite)"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
