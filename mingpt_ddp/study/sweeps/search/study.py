"""Keep the trials of a search in a study of Optuna: a journal in the sweep's directory.

A trial is a job whose values a sampler has drawn.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError, RunError, counted, reason
from mingpt_ddp.storage.run_directory import JOURNAL, RESULT, STUDY_ATTRIBUTE, read_result
from mingpt_ddp.storage.storage import open_regular
from mingpt_ddp.storage.yaml_and_json import finite
from mingpt_ddp.study.results.objective import Objective, objective_named
from mingpt_ddp.study.sweeps.search.methods import pruner, sampler
from mingpt_ddp.study.sweeps.search.optuna_library import journal, no_warnings, optuna
from mingpt_ddp.study.sweeps.search.space import BaseDistribution, describe, rounded

FrozenTrial = optuna.trial.FrozenTrial
TrialState = optuna.trial.TrialState

CHOOSE_ANOTHER_NAME = "choose another run.name"
# Attribute of a trial: the step of the evaluation after which the trial was pruned.
PRUNED_AT = "pruned_at"


class Study:
    """The trials of a search. A trial has the same number as its job.

    This process has locked the directory of the sweep. A trial is recorded with its values before
    its job begins, and ends when the directory of the job has a result. If the process is killed
    in between, the trial stays RUNNING, and the next start runs its job again with the same values.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        space: dict[str, BaseDistribution],
        fixed: dict[str, Any],
    ) -> None:
        """Open the journal of the search, or create it.

        Args:
            config: Configuration of one of the jobs, with the settings of the sweep.
            space: The distribution of each swept key.
            fixed: Values of all other keys that change results, by dotted key. They must be the
                same whenever the search continues.

        Raises:
            ConfigError: A setting is invalid or differs from the recorded search, or the journal is
                missing although jobs have ended.
            RunError: The journal is damaged, has trials of another program, or cannot be written.
        """
        self._directory = directory
        self._sweep = config.sweep
        self._space = space
        self._objective = objective_named(config.sweep.metric)
        # This path is absolute, because Optuna's lock is a symbolic link to it.
        self._path = directory.absolute() / JOURNAL
        header = {
            "sweep.metric": self._objective.metric,
            "sweep.seed": config.sweep.seed,
            **{key: describe(distribution) for key, distribution in space.items()},
            **fixed,
        }
        with no_warnings():
            self._storage, self._study = self._open()
            self._study.pruner = pruner(config)
            self._study.sampler = optuna.samplers.RandomSampler()  # not used, see `_draw`
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)
        known = self._study.user_attrs.get(STUDY_ATTRIBUTE)
        if known is None:
            with self._writing():
                self._study.set_user_attr(STUDY_ATTRIBUTE, header)
        else:
            _check_same_search(known, json.loads(json.dumps(header)))
        self._check_trials()

    def values(self, number: int) -> dict[str, Any]:
        """Return the values of a trial. If the trial is new, draw and record its values first."""
        trials = self._trials()
        if number == len(trials):
            values = self._draw(trials)
            trial = optuna.create_trial(
                state=TrialState.RUNNING, params=values, distributions=self._space
            )
            with self._writing():
                # The journal gets a single line, so that a kill leaves no trial without values.
                self._study.add_trial(trial)
        return dict(self._trials()[number].params)

    def directory_of(self, number: int) -> Path | None:
        """Return the job directory of a complete or pruned trial. Return None for other trials."""
        if self._state(number) not in (TrialState.COMPLETE, TrialState.PRUNED):
            return None
        return self._directory / self._trials()[number].user_attrs["job"]

    def has_failed(self, number: int) -> bool:
        """Return True if a trial has failed for good."""
        return self._state(number) == TrialState.FAIL

    @property
    def n_pruned(self) -> int:
        """Number of pruned trials."""
        return sum(trial.state == TrialState.PRUNED for trial in self._trials())

    def report(self, number: int, step: int, value: float) -> str | None:
        """Record an evaluation of a job. Return the reason if the pruner ends the job, else None.

        A job that resumes reports some evaluations again. For these, return the recorded decision.
        """
        known = self._trials()[number]
        pruned_at = known.user_attrs.get(PRUNED_AT)
        if pruned_at is None and step >= (known.last_step or 0):
            trial = self._trial(number)
            with self._writing():
                trial.report(value, step)
                if trial.should_prune():
                    pruned_at = step
                    trial.set_user_attr(PRUNED_AT, step)
        if pruned_at is None or step < pruned_at:
            return None
        return f"other jobs have better evaluations (sweep.pruner={self._sweep.pruner})"

    def end(self, number: int, directory: Path) -> None:
        """Record the end of a complete or pruned job, unless its end is recorded already.

        Raises:
            RunError: The job's result.json does not have the metric.
        """
        if self._state(number).is_finished():
            return
        result = read_result(directory)
        is_pruned = result.get("status") == RunStatus.PRUNED
        value = None if is_pruned else _objective_value(result, self._objective)
        state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
        with self._writing():
            self._trial(number).set_user_attr("job", directory.name)
            self._study.tell(number, value, state)

    def fail(self, number: int) -> None:
        """Record that a job has failed for good."""
        with self._writing():
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _draw(self, trials: list[FrozenTrial]) -> dict[str, Any]:
        """Draw the values of the next trial. They depend on its seed and on all results so far."""
        with no_warnings():
            copy = optuna.create_study(
                direction=self._study.direction, sampler=sampler(self._sweep, len(trials))
            )
            copy.add_trials(trials)
            drawn = copy.ask(self._space).params
        return {key: rounded(drawn[key], self._space[key]) for key in self._space}

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _state(self, number: int) -> TrialState:
        trials = self._trials()
        return trials[number].state if number < len(trials) else TrialState.WAITING

    def _trial(self, number: int) -> optuna.Trial:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        return optuna.Trial(self._study, trial_id)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to the journal in this context. If a write fails, remove its partial line.

        Raises:
            RunError: The journal cannot be written.
        """
        try:
            with no_warnings():
                yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._repair()
            raise RunError(f"cannot write {self._path}: {reason(error)}") from error

    def _open(self) -> tuple[journal.JournalStorage, optuna.Study]:
        """Open the study in the journal. Create it if no job in the directory has ended."""
        try:
            size = self._repair()
            if size == 0:
                self._check_new()
            storage = journal.JournalStorage(journal.JournalFileBackend(str(self._path)))
            if size == 0:
                optuna.create_study(
                    storage=storage,
                    study_name=self._directory.name,
                    direction="maximize" if self._objective.maximize else "minimize",
                )
            # The directory may have been renamed since, so ask the journal for the name.
            (name,) = [study.study_name for study in storage.get_all_studies()]
            study = optuna.load_study(study_name=name, storage=storage)
            if study.get_trials(deepcopy=False) and STUDY_ATTRIBUTE not in study.user_attrs:
                raise ValueError("another program has written the trials")
            if type(study.user_attrs.get(STUDY_ATTRIBUTE, {})) is not dict:
                raise ValueError("the header is not a mapping")
        except ConfigError:
            raise
        except Exception as error:  # raised by the system, or by Optuna
            what = (
                f"cannot be read: {reason(error)}" if isinstance(error, OSError) else "is damaged"
            )
            raise RunError(
                f"{self._path} {what}; move it away to begin a new search, or {CHOOSE_ANOTHER_NAME}"
            ) from error
        return storage, study

    def _check_trials(self) -> None:
        """Check that each trial has values in this search space, and a job in this directory.

        The values become overrides of a job. An untrusted journal must not override other keys.

        Raises:
            RunError: A trial does not belong to this search.
        """
        for trial in self._trials():
            try:
                optuna.create_trial(
                    state=TrialState.RUNNING, params=trial.params, distributions=self._space
                )
                has_values = trial.distributions == self._space
            except ValueError:
                has_values = False
            is_kept = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
            job = trial.user_attrs.get("job")
            has_job = isinstance(job, str) and job not in ("", "..") and Path(job).name == job
            if not has_values or (is_kept and not has_job):
                raise RunError(
                    f"{self._path}: trial {trial.number} does not belong to this search, because "
                    f"another program has written it; move the file away, or {CHOOSE_ANOTHER_NAME}"
                )

    def _check_new(self) -> None:
        """Refuse to begin a new search in a directory with ended jobs of another search."""
        ended = len([*self._directory.glob(f"*/{RESULT}")])
        check(
            not ended,
            f"{self._path} is missing or empty, but its search has {counted(ended, 'ended job')}; "
            f"restore the file, or {CHOOSE_ANOTHER_NAME}",
        )

    def _repair(self) -> int:
        """Remove stale locks and a partial last line, which a kill or a full disk leaves behind.

        Otherwise Optuna would wait 30 seconds for a stale lock, and append to the partial line.

        Returns:
            The size of the journal in bytes, or 0 if there is no journal.
        """
        for stale in self._directory.glob(f"{JOURNAL}.lock*"):
            stale.unlink()
        if not os.path.lexists(self._path):
            return 0
        with open_regular(self._path, os.O_RDWR | os.O_NOFOLLOW, "r+b") as file:
            content = file.read()
            size = content.rfind(b"\n") + 1 or len(content)
            file.truncate(size)
        return size


def _check_same_search(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the settings of a command are the settings of the recorded search.

    Raises:
        ConfigError: A setting differs. The message names it.
    """
    for key in {**before, **now}:
        old, new = (json.dumps(each[key]) if key in each else "not set" for each in (before, now))
        check(
            old == new,
            f"{key}={new} was {old} when the search in this directory began; {CHOOSE_ANOTHER_NAME}",
        )


def _objective_value(result: dict[str, Any], objective: Objective) -> float:
    """Return the value of the objective in a result.json.

    Raises:
        RunError: The result has no finite number for the objective.
    """
    value = finite(objective.recorded_in(result))
    if value is not None:
        return value
    numbers = [key for key, each in result.items() if type(each) in (int, float)]
    raise RunError(
        f"sweep.metric={objective.key}: the job's result.json has no finite number of this "
        f"name; choose one of {', '.join(numbers)}"
    )
