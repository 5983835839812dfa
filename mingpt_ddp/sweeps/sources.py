"""What the jobs of a sweep are: all combinations of a grid, or the trials of a study."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mingpt_ddp.config.schema import SweepConfig
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.errors import RunError
from mingpt_ddp.storage.run_dir import RunStatus, read_result

if TYPE_CHECKING:
    from mingpt_ddp.sweeps.study import Study


class Source(Protocol):
    """The jobs of a sweep by number, from 0. Its methods are called on rank zero, if not stated."""

    total: int
    judges: bool  # every evaluation is reported; the same on all ranks

    def overrides(self, number: int) -> list[str]:
        """Return the overrides of a job, in the order of the numbers; on all ranks."""

    def can_start(self, number: int) -> bool:
        """Return whether the results that determine the job are known."""

    def is_settled(self, number: int, has_larger_limits: bool) -> bool:
        """Return whether the job has ended for good, so that it need not even be composed."""

    def failed_before(self, number: int) -> str | None:
        """Return why the job has failed for good; None if it has not."""

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        """Record an evaluation; return why the job is pruned, None if it goes on."""

    def finish(self, number: int, directory: Path) -> None:
        """Record the end of a complete or pruned job."""

    def fail(self, number: int, reason: str) -> None:
        """Record a failure."""


class Grid:
    """All combinations of the values; what the jobs have measured stands in their directories."""

    judges = False

    def __init__(self, jobs: list[list[str]]) -> None:
        """
        Args:
            jobs: the overrides of each.
        """
        self._jobs = jobs
        self.total = len(jobs)

    def overrides(self, number: int) -> list[str]:
        return self._jobs[number]

    def can_start(self, number: int) -> bool:
        return True

    def is_settled(self, number: int, has_larger_limits: bool) -> bool:
        return False

    def failed_before(self, number: int) -> str | None:
        return None

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        return None

    def finish(self, number: int, directory: Path) -> None:
        pass

    def fail(self, number: int, reason: str) -> None:
        pass


class Trials:
    """The trials of a study."""

    judges = True

    def __init__(
        self, study: "Study", settings: SweepConfig, fixed: list[str], directory: Path
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
        self.total = settings.trials

    def overrides(self, number: int) -> list[str]:
        from mingpt_ddp.sweeps.space import override_text

        values = self._study.trial(number).values
        return [*self._fixed, *(override_text(key, value) for key, value in values.items())]

    def can_start(self, number: int) -> bool:
        return self._study.can_draw(number)

    def is_settled(self, number: int, has_larger_limits: bool) -> bool:
        from mingpt_ddp.sweeps.study import Outcome

        outcome = self._study.outcome(number)
        if outcome is None:
            return False
        if outcome is Outcome.FAILED:
            return self._study.failures(number) > self._settings.retries
        if outcome is Outcome.PRUNED and self._settings.pruner == "none":
            return False
        return not has_larger_limits and bool(read_result(self._job_directory(number)))

    def _job_directory(self, number: int) -> Path:
        return self._directory / (self._study.job(number) or "-")

    def failed_before(self, number: int) -> str | None:
        from mingpt_ddp.sweeps.study import Outcome

        if self._study.outcome(number) is not Outcome.FAILED:
            return None
        if self._study.failures(number) <= self._settings.retries:
            return None
        return self._study.reason(number)

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> str | None:
        objective = self._settings.objectives[0].removeprefix("-")
        value = metrics.get(objective, metrics.get(objective.removeprefix("val_")))
        if value is None:
            return None
        return self._study.report(number, step, value)

    def finish(self, number: int, directory: Path) -> None:
        from mingpt_ddp.sweeps.study import Outcome

        result = read_result(directory)
        is_pruned = result.get("status") == RunStatus.PRUNED
        outcome = Outcome.PRUNED if is_pruned else Outcome.COMPLETE
        values = [_number(result, name.removeprefix("-")) for name in self._settings.objectives]
        if self._study.outcome(number) is not None:
            if self._recorded(number) == (outcome, values):
                return
            self._study.reopen(number)
        self._study.finish(number, outcome, values, job=directory.name)

    def _recorded(self, number: int) -> tuple[Any, Sequence[float]]:
        return self._study.outcome(number), [*self._study.values(number)]

    def fail(self, number: int, reason: str) -> None:
        from mingpt_ddp.sweeps.study import Outcome

        if self._study.outcome(number) is not None:
            self._study.reopen(number)
        self._study.finish(number, Outcome.FAILED, reason=reason)


def _number(result: Mapping[str, Any], name: str) -> float:
    """Return a number of a result.json.

    Raises:
        RunError: there is none of this name.
    """
    value = result.get(name)
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    numbers = [key for key, each in result.items() if type(each) in (int, float)]
    raise RunError(
        f"sweep.objectives={name}: the job's result.json has no such number; "
        f"it has {', '.join(numbers)}"
    )


class LockStep:
    """The jobs of a source that rank zero alone has: it sends their overrides to the other ranks.

    The store of the process group carries them: they decide how the group of the job is built. It
    may still hold those of an attempt before a restart, which are the same.
    """

    def __init__(self, source: Source | None, total: int, judges: bool, env: DistEnv) -> None:
        """
        Args:
            source: on rank zero.
        """
        self._source = source
        self._env = env
        self.total = total
        self.judges = judges

    def overrides(self, number: int) -> list[str]:
        from mingpt_ddp.distributed.rendezvous import connect

        store = connect(self._env, number, STORE_TIMEOUT_S)
        if self._source is not None:
            store.set("overrides", json.dumps(self._source.overrides(number)))
        words: list[str] = json.loads(store.get("overrides"))
        return words

    def is_settled(self, number: int, has_larger_limits: bool) -> bool:
        return False  # all ranks ask rank zero once the job has its process group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # called on rank zero


STORE_TIMEOUT_S = 600.0
