"""The file of a study, Optuna's journal: its tools read it, and this process alone writes it.

This process holds the lock of the directory.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mingpt_ddp.errors import RunError, reason
from mingpt_ddp.results.optuna_library import journal, no_warnings, optuna
from mingpt_ddp.storage.storage import atomic_write, open_regular
from mingpt_ddp.sweeps.search.optuna_trials import FrozenTrial, StudyDirection, TrialState

BEGINNING = b'{"directions":['  # of a file of `write`: Optuna itself writes another key first


class _Lines(journal.BaseJournalBackend):
    """The lines of a journal that is written as a whole."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs += logs


class Journal:
    """The study of a file, and the lines that are appended to it."""

    def __init__(self, path: Path) -> None:
        """Read the file, without a last line that was not written to its end; write nothing.

        Raises:
            OSError: it cannot be read.
            Exception: it is damaged, or of another program; that of Optuna differs.
        """
        self._path = path.absolute()  # Optuna's lock is a symbolic link to it
        self._study: optuna.Study | None = None
        self._load()

    @property
    def is_new(self) -> bool:
        """Return whether the file is missing, or has no trials and not even a whole header."""
        return self._study is None

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the study; {} of a new one."""
        return {} if self._study is None else self._study.user_attrs

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, which must not be changed."""
        return [] if self._study is None else self._study.get_trials(deepcopy=False)

    def repair(self) -> None:
        """Remove what killed processes have left: locks, half a file, and half of a last line.

        Optuna would wait 30 seconds for such a lock, and append to half a line.
        """
        name = self._path.name
        for pattern in (f"{name}.lock*", f".{name}.*.partial"):
            for stale in self._path.parent.glob(pattern):
                stale.unlink()
        if self._path.exists():
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)

    def write(
        self,
        direction: StudyDirection,
        attributes: Mapping[str, Any],
        trials: Sequence[FrozenTrial],
    ) -> None:
        """Replace the file, atomically."""
        backend = _Lines()
        with self.written():
            study = optuna.create_study(
                storage=journal.JournalStorage(backend),
                study_name=self._path.parent.name,
                direction=direction,
            )
            for key, value in attributes.items():
                study.set_user_attr(key, value)
            study.add_trials(trials)
            logs = [dict(sorted(each.items())) for each in backend.logs]
            lines = [json.dumps(each, separators=(",", ":")) for each in logs]
            atomic_write(self._path, "".join(f"{line}\n" for line in lines).encode())
            self._load()

    def add(self, trial: FrozenTrial) -> None:
        """Append a trial with its values, in one line."""
        assert self._study is not None
        with self.written():
            self._study.add_trial(trial)

    def report(self, number: int, step: int, value: float) -> None:
        """Append an evaluation of a running trial."""
        with self.written():
            self._storage.set_trial_intermediate_value(self._id(number), step, value)

    def set(self, number: int, key: str, value: Any) -> None:
        """Append an attribute of a running trial."""
        with self.written():
            self._storage.set_trial_user_attr(self._id(number), key, value)

    def end(self, number: int, state: TrialState, value: float | None = None) -> None:
        """Append the end of a running trial."""
        with self.written():
            self._storage.set_trial_state_values(
                self._id(number), state, None if value is None else [value]
            )

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Leave no half of a line if the disk is full.

        Raises:
            RunError: the disk is full, or fails.
        """
        try:
            with no_warnings():
                yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self.repair()
            raise RunError(f"cannot write {self._path}: {reason(error)}") from error

    def _load(self) -> None:
        if not os.path.lexists(self._path):
            return
        with open_regular(self._path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            data = file.read()
        *lines, _ = data.split(b"\n")
        if lines:
            json.loads(lines[-1])  # Optuna takes it for half a line, and writes on behind it
        with no_warnings():
            self._storage = journal.JournalStorage(journal.JournalFileBackend(str(self._path)))
            names = [each.study_name for each in self._storage.get_all_studies()]
            if not names:
                _check_beginning(data)
                return
            (name,) = names  # not always that of the directory, which may have been moved
            study = optuna.load_study(study_name=name, storage=self._storage)
        self._study_id = self._storage.get_study_id_from_name(name)
        if study.user_attrs or study.get_trials(deepcopy=False):
            self._study = study
        else:
            _check_beginning(data)

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


def _check_beginning(data: bytes) -> None:
    """Check that a file without a header is the beginning of one of `write`, which may be empty.

    Raises:
        ValueError: another program has written it.
    """
    if not (data.startswith(BEGINNING) or BEGINNING.startswith(data)):
        raise ValueError("this is not the beginning of a study of a sweep")
