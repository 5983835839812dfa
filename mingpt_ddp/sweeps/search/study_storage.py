"""Optuna's file of a study, for its own tools: derived from our records, never read as the truth.

This process alone writes it: it holds the lock of the directory.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mingpt_ddp.results.optuna_library import no_warnings, optuna
from mingpt_ddp.sweeps.search.optuna_trials import (
    FrozenTrial,
    StudyDirection,
    TrialState,
    distributions_as_json,
)

log = logging.getLogger(__name__)

FILE = "study.journal"
MAX_BYTES = 1 << 30
TrialsOf = Callable[[], Sequence[FrozenTrial]]


class _CannotContinueError(Exception):
    """The file holds something that the records contradict."""


class StudyStorage:
    """The file; a failure to write it ends only its updates."""

    def __init__(
        self, directory: Path, directions: Sequence[StudyDirection], trials: TrialsOf
    ) -> None:
        """Write nothing yet.

        Args:
            trials: returns all trials as the records have them.
        """
        self.path = directory / FILE
        self._name = directory.absolute().name
        self._directions = list(directions)
        self._trials = trials
        self._storage: optuna.storages.BaseStorage | None = None
        self._ids: list[int] = []

    def open(self) -> None:
        """Repair the file and append what it lacks; if that cannot be, write it new."""
        with self._kept_apart():
            self._remove_stale_locks()
            if os.path.lexists(self.path):
                try:
                    self._continue()
                    return
                except Exception as error:  # exceptions differ by what is wrong with the file
                    log.debug("%s cannot be continued: %s", self.path, error)
            self._write_new()

    def create(self, trial: FrozenTrial) -> None:
        """Append a trial with its parameters in one operation."""
        with self._kept_apart() as storage:
            if storage is not None:
                self._ids.append(storage.create_new_trial(self._study_id, trial))

    def report(self, number: int, step: int, value: float) -> None:
        """Append an evaluation of a running trial."""
        with self._kept_apart() as storage:
            if storage is not None:
                storage.set_trial_intermediate_value(self._ids[number], step, value)

    def finish(self, trial: FrozenTrial) -> None:
        """Finish a running trial."""
        with self._kept_apart() as storage:
            if storage is not None:
                self._finish(storage, trial)

    def rewrite(self) -> None:
        """Write the file new: a finished trial runs again, which Optuna forbids."""
        with self._kept_apart() as storage:
            if storage is not None:
                self._write_new()

    @contextlib.contextmanager
    def _kept_apart(self) -> Iterator[optuna.storages.BaseStorage | None]:
        try:
            with no_warnings():
                yield self._storage
        except Exception as error:  # Optuna's, the system's
            self._storage = None
            reason = " ".join(str(error).split())[:200]
            log.warning(
                "%s is no longer updated: %s; the sweep goes on without it, and the next start "
                "writes it",
                self.path,
                reason or type(error).__name__,
            )

    def _continue(self) -> None:
        if self.path.is_symlink() or not self.path.is_file():
            raise _CannotContinueError("not a regular file")
        if self.path.stat().st_size > MAX_BYTES:
            raise _CannotContinueError("too large")
        _cut_torn_line(self.path)
        storage = self._connect()
        names = [study.study_name for study in storage.get_all_studies()]
        if self._name not in names:
            raise _CannotContinueError("another study")
        self._study_id = storage.get_study_id_from_name(self._name)
        if storage.get_study_directions(self._study_id) != self._directions:
            raise _CannotContinueError("other objectives")
        there = storage.get_all_trials(self._study_id)
        ours = self._trials()
        if len(there) > len(ours):
            raise _CannotContinueError("more trials")
        self._ids = [trial._trial_id for trial in there]
        for old, new in zip(there, ours, strict=False):
            _check_continues(old, new)
        for old, new in zip(there, ours, strict=False):
            self._update(storage, old, new)
        for new in ours[len(there) :]:
            self._ids.append(storage.create_new_trial(self._study_id, new))

    def _update(
        self, storage: optuna.storages.BaseStorage, old: FrozenTrial, new: FrozenTrial
    ) -> None:
        if old.state.is_finished():
            return
        for step in new.intermediate_values.keys() - old.intermediate_values.keys():
            value = new.intermediate_values[step]
            storage.set_trial_intermediate_value(self._ids[new.number], step, value)
        if new.state.is_finished():
            self._finish(storage, new)

    def _finish(self, storage: optuna.storages.BaseStorage, trial: FrozenTrial) -> None:
        for key, value in trial.user_attrs.items():
            storage.set_trial_user_attr(self._ids[trial.number], key, value)
        storage.set_trial_state_values(self._ids[trial.number], trial.state, trial.values)

    def _write_new(self) -> None:
        """Move the file away and write all trials into a new one; the next start completes it."""
        if os.path.lexists(self.path):
            os.replace(self.path, self.path.with_name(f"{FILE}.before"))
        storage = self._connect()
        self._study_id = storage.create_new_study(self._directions, self._name)
        self._ids = [storage.create_new_trial(self._study_id, each) for each in self._trials()]

    def _connect(self) -> optuna.storages.BaseStorage:
        from optuna.storages.journal import JournalFileBackend

        self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.path)))
        return self._storage

    def _remove_stale_locks(self) -> None:
        """Remove the locks of a killed process, for which Optuna would wait 30 seconds."""
        for stale in self.path.parent.glob(f"{FILE}.lock*"):
            stale.unlink()


def _cut_torn_line(path: Path) -> None:
    """Cut a last line that a killed process or a full disk has left without its end."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at > 0:
            start = max(at - 65536, 0)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < end:
            file.truncate(at)


def _check_continues(old: FrozenTrial, new: FrozenTrial) -> None:
    """Check that a trial of the file can become what the records say."""
    same_reports = {
        step: value
        for step, value in old.intermediate_values.items()
        if new.intermediate_values.get(step) == value
    }
    ok = old.number == new.number and old.params == new.params
    ok &= distributions_as_json(old.distributions) == distributions_as_json(new.distributions)
    ok &= same_reports == old.intermediate_values
    if old.state.is_finished():
        ok &= old.state == new.state and old.values == new.values
        ok &= old.intermediate_values == new.intermediate_values
        ok &= old.user_attrs.items() >= new.user_attrs.items()
    else:
        ok &= old.state == TrialState.RUNNING
    if not ok:
        raise _CannotContinueError(f"trial {new.number} differs")
