"""The trials of a study, as the jobs of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mingpt_ddp.config.keys.schema import SweepConfig
from mingpt_ddp.errors import RunError
from mingpt_ddp.storage.records import finite
from mingpt_ddp.storage.run_dir import RunStatus, read_result
from mingpt_ddp.sweeps.jobs import has_ended_at
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.space import override_text
from mingpt_ddp.sweeps.search.study import Study


class Trials:
    """What becomes of the trials of a study, whose jobs have the same numbers."""

    def __init__(
        self,
        study: Study,
        settings: SweepConfig,
        fixed: list[str],
        directory: Path,
    ) -> None:
        """
        Args:
            fixed: the overrides that all trials share.
            directory: of the sweep.
        """
        self._study = study
        self._settings = settings
        self._fixed = fixed
        self._directory = directory

    def begin(self) -> None:
        """Write what is kept between starts; the directory is locked."""
        self._study.begin()

    def overrides(self, number: int) -> list[str]:
        """Return the overrides of a job, in the order of the numbers."""
        values = self._study.values(number)
        return [*self._fixed, *(override_text(key, value) for key, value in values.items())]

    def is_settled(self, number: int, limits: Mapping[str, Any]) -> bool:
        """Return whether the job has ended for good, so that it need not even be composed.

        Args:
            limits: of the jobs of this start; an earlier one may have ended some at smaller ones.
        """
        state = self._study.state(number)
        if not state.is_finished():
            return False
        if state == TrialState.FAIL:
            return self.failed_before(number) is not None
        directory = self.directory(number)
        if state == TrialState.COMPLETE:
            return has_ended_at(directory, limits)
        return self._settings.pruner != "none" and bool(read_result(directory))

    def directory(self, number: int) -> Path:
        """Return the directory of a settled job that has not failed."""
        return self._directory / self._study.trial(number).user_attrs["job"]

    def failed_before(self, number: int) -> str | None:
        """Return why the job has failed for good; None if it has not."""
        failures = self._study.failures(number)
        has_failed = self._study.state(number) == TrialState.FAIL
        return failures[-1] if has_failed and len(failures) > self._settings.retries else None

    def match(self, number: int, directory: Path) -> None:
        """Let a job of a grid keep its record although other keys vary than before."""
        self._study.match(number, directory.name)

    def start(self, number: int) -> None:
        """Record that a job starts, perhaps again."""
        if self._study.state(number).is_finished():
            self._study.reopen(number)

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        """Record an evaluation; return why the job is pruned, None if it goes on."""
        objective = self._settings.objectives[0].removeprefix("-")
        value = metrics.get(objective, metrics.get(objective.removeprefix("val_")))
        if value is None:
            return None
        return self._study.report(number, step, value)

    def finish(self, number: int, directory: Path) -> None:
        """Record the end of a complete or pruned job."""
        result = read_result(directory)
        is_pruned = result.get("status") == RunStatus.PRUNED
        state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
        values = [_number(result, name.removeprefix("-")) for name in self._settings.objectives]
        trial = self._study.trial(number)
        is_same = trial.state == state and (is_pruned or trial.values == values)
        if is_same and trial.user_attrs.get("job") == directory.name:
            return
        self.start(number)
        self._study.finish(number, state, values, job=directory.name)

    def fail(self, number: int, reason: str) -> None:
        """Record a failure."""
        self.start(number)
        self._study.fail(number, reason)


def _number(result: Mapping[str, Any], name: str) -> float:
    """Return a number of a result.json.

    Raises:
        RunError: there is none of this name.
    """
    value = finite(result.get(name))
    if value is not None:
        return value
    numbers = [key for key, each in result.items() if type(each) in (int, float)]
    raise RunError(
        f"sweep.objectives={name}: the job's result.json has no such number; "
        f"it has {', '.join(numbers)}"
    )
