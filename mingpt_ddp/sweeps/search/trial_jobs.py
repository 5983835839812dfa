"""The trials of a study, as the jobs of a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.errors import RunError
from mingpt_ddp.results.objective import Objective, objective_named
from mingpt_ddp.storage.run_directory import RunStatus, read_result
from mingpt_ddp.storage.yaml_and_json import finite
from mingpt_ddp.sweeps.job import has_ended
from mingpt_ddp.sweeps.search.optuna_trials import TrialState
from mingpt_ddp.sweeps.search.space import override_text
from mingpt_ddp.sweeps.search.study import Study


class Trials:
    """What becomes of the trials of a study, by number of their jobs."""

    def __init__(
        self,
        study: Study,
        config: Config,
        fixed: list[str],
        directory: Path,
        listed: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """
        Args:
            config: of a job of this start.
            fixed: the overrides that all trials share.
            directory: of the sweep.
            listed: the values of the jobs of a grid.
        """
        self._study = study
        self.config = config
        self._objective = objective_named(config.sweep.metric)
        self._fixed = fixed
        self._directory = directory
        self._listed = listed
        self._trials: dict[int, int] = {}  # numbers of trials by number of the job

    def begin(self) -> None:
        """Write what is kept between starts; the directory is locked."""
        self._study.begin()

    def overrides(self, number: int) -> list[str]:
        """Return the overrides of a job of a search, in the order of the numbers."""
        values = self._study.values(number)
        self._trials[number] = number
        return [*self._fixed, *(override_text(key, value) for key, value in values.items())]

    def ended_in(self, number: int) -> Path | None:
        """Return the directory of a job that has ended for good, complete or pruned; else None.

        That of a search need not even be composed. An earlier start may have ended some at
        smaller limits.
        """
        ended = (TrialState.COMPLETE, TrialState.PRUNED)
        if self._listed or self._study.state(number) not in ended:
            return None
        directory = self._directory / self._study.trial(number).user_attrs["job"]
        return directory if has_ended(directory, self.config) else None

    def open(self, number: int, directory: Path) -> None:
        """Find or record the trial of a job of a grid; that of a search is recorded."""
        if self._listed:
            self._trials[number] = self._study.number_of(directory.name, self._listed[number])

    def start(self, number: int) -> None:
        """Record that a job starts, perhaps again."""
        trial = self._trials[number]
        if self._study.state(trial).is_finished():
            self._study.reopen(trial)

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        """Record an evaluation; return why the job is pruned, None if it goes on."""
        value = metrics.get(self._objective.series.removeprefix("val_"))
        if value is None:
            return None
        return self._study.report(self._trials[number], step, value)

    def finish(self, number: int, directory: Path) -> None:
        """Record the end of a complete or pruned job."""
        result = read_result(directory)
        is_pruned = result.get("status") == RunStatus.PRUNED
        state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
        value = _number(result, self._objective)
        trial = self._study.trial(self._trials[number])
        is_same = trial.state == state and (is_pruned or trial.value == value)
        if is_same and trial.user_attrs.get("job") == directory.name:
            return
        self.start(number)
        self._study.finish(trial.number, state, value, job=directory.name)

    def fail(self, number: int) -> None:
        """Record that a failure has ended the job, unless that is recorded."""
        trial = self._trials.get(number)  # None: of a grid, before its directory was known
        if trial is not None and self._study.state(trial) != TrialState.FAIL:
            self.start(number)
            self._study.fail(trial)


def _number(result: Mapping[str, Any], objective: Objective) -> float:
    """Return the objective in a result.json.

    Raises:
        RunError: It has no such number.
    """
    value = finite(objective.recorded_in(result))
    if value is not None:
        return value
    numbers = [key for key, each in result.items() if type(each) in (int, float)]
    raise RunError(
        f"sweep.metric={objective.series}: the job's result.json has no such number; "
        f"it has {', '.join(numbers)}"
    )
