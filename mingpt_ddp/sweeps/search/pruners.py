"""The decisions of the pruners of a sweep, and these in words."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.errors import counted
from mingpt_ddp.results.objective import Objective, objective_named
from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.sweeps.search.methods import pruner_settings
from mingpt_ddp.sweeps.search.optuna_trials import (
    FrozenTrial,
    TrialState,
    direction,
    in_memory,
)

RUNG = "completed_rung_"  # begins Optuna's attribute of a trial for a rung that it has reached
BEST_PART = {2: "half", 3: "third", 4: "quarter", 5: "fifth"}


@dataclass(frozen=True)
class Pruned:
    """The decision that a trial ends."""

    step: int
    reason: str
    rung: int | None  # of asha, the last one that the trial has reached


@dataclass(frozen=True)
class Pruning:
    """What judges the evaluations of a study, on a copy of it in memory.

    Optuna's asha keeps the rungs of a trial. Here they follow from its evaluations: a kill between
    a rung and the decision about it would change that.
    """

    sweep: SweepConfig
    first_evaluation: int  # the step of the first one of the first trial that has one

    def decide(
        self, trials: Sequence[FrozenTrial], judged: FrozenTrial, step: int, value: float
    ) -> Pruned | None:
        """Return why a trial ends after an evaluation; None: it goes on.

        Args:
            trials: all, the judged one too, without this evaluation.
        """
        before = judged.intermediate_values
        if step < max(before, default=0):  # before an evaluation that has been judged
            return None
        reports = {**before, step: value}
        others = [trial for trial in trials if trial.number != judged.number]
        with no_warnings():
            study = in_memory(direction(self._objective), [self._copy(trial) for trial in others])
            study.add_trial(self._copy(judged, reports))
            is_pruned = self._pruner().prune(study, study.trials[-1])
        if not is_pruned:
            return None
        if self.sweep.pruner == "median":
            return Pruned(step, self._why_median(others, reports, step), None)
        return self._because_of_asha(study.trials, step)

    @property
    def _objective(self) -> Objective:
        return objective_named(self.sweep.metric)

    def _settings(self) -> dict[str, Any]:
        settings = asdict(pruner_settings(self.sweep))
        if self.sweep.pruner == "asha":
            settings["min_resource"] = settings["min_resource"] or max(self.first_evaluation, 1)
        return settings

    def _pruner(self) -> optuna.pruners.BasePruner:
        if self.sweep.pruner == "median":
            return optuna.pruners.MedianPruner(**self._settings())
        return optuna.pruners.SuccessiveHalvingPruner(**self._settings())

    def _copy(self, trial: FrozenTrial, reports: Mapping[int, float] | None = None) -> FrozenTrial:
        """Return what a pruner reads of a trial, with the evaluation to judge if it is given."""
        return optuna.create_trial(
            state=trial.state,
            value=0.0 if trial.state == TrialState.COMPLETE else None,
            intermediate_values=dict(reports or trial.intermediate_values),
            system_attrs=self._rungs(trial) if self.sweep.pruner == "asha" else {},
        )

    def _rungs(self, trial: FrozenTrial) -> dict[str, float]:
        """Return the value of a trial at each rung that it has reached, as Optuna keeps them."""
        settings = self._settings()
        factor, rate = settings["reduction_factor"], settings["min_early_stopping_rate"]
        last = trial.user_attrs.get("pruned", {}).get("rung")
        rungs: dict[str, float] = {}
        for step, value in trial.intermediate_values.items():
            while step >= settings["min_resource"] * factor ** (rate + len(rungs)):
                if last is not None and len(rungs) > last:
                    return rungs
                rungs[f"{RUNG}{len(rungs)}"] = value
        return rungs

    def _why_median(
        self, others: Sequence[FrozenTrial], reports: Mapping[int, float], step: int
    ) -> str:
        known = [
            trial.intermediate_values[step]
            for trial in others
            if trial.state == TrialState.COMPLETE and step in trial.intermediate_values
        ]
        objective = self._objective
        best = min(reports.values(), key=objective.cost)
        side = "below" if objective.maximize else "above"
        return (
            f"{objective.title} {_text(best)} is {side} the median "
            f"{_text(statistics.median(known))} of {counted(len(known), 'job')} at step {step}"
        )

    def _because_of_asha(self, trials: Sequence[FrozenTrial], step: int) -> Pruned:
        """
        Args:
            trials: as the pruner has left them, the judged one last.
        """
        rung = sum(key.startswith(RUNG) for key in trials[-1].system_attrs)
        count = sum(f"{RUNG}{rung - 1}" in trial.system_attrs for trial in trials)
        factor = self._settings()["reduction_factor"]
        part = BEST_PART.get(factor, f"1/{factor}")
        jobs = counted(count, "job")
        why = f"not among the best {part} of {jobs} at rung {rung}, step {step}"
        return Pruned(step, why, rung - 1)


def _text(value: float) -> str:
    """Return a number to four digits after the point, or say that it was not finite."""
    if not math.isfinite(value):
        return "(not finite)"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
