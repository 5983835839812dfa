"""Show the progress of a sweep: how many jobs have ended, how many run, and the best value."""

from collections.abc import Sized
from pathlib import Path

from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.process import logs
from mingpt_ddp.storage.run_directory import read_result
from mingpt_ddp.study.results.objective import objective_named
from mingpt_ddp.study.sweeps.sweep import Sweep


class ProgressLine:
    """A line below the log with the progress of concurrent jobs, drawn only on a terminal."""

    def __init__(self, sweep: Sweep, running: Sized) -> None:
        """
        Args:
            running: The jobs that run now. The caller keeps this collection up to date.
        """
        self._sweep = sweep
        self._running = running
        self._objective = objective_named(sweep.settings.metric)
        self._values: dict[Path, float] = {}  # objective of each complete job
        self._bar = logs.progress_bar(sweep.env, sweep.n_jobs, "sweep", "job")

    def update(self) -> None:
        """Draw the line again, after a job has started or ended."""
        if self._bar.disable:
            return
        sweep, objective = self._sweep, self._objective
        for directory in {*sweep.done.values()} - self._values.keys():
            result = read_result(directory)
            if result.get("status") == RunStatus.COMPLETE:
                self._values[directory] = objective.value(result)
        state = f"{len(self._running)} running"
        if self._values:
            best = min(self._values.values(), key=objective.cost)
            state += f", best {objective.title} {best:.4f}"
        self._bar.n = len(sweep.done) + len(sweep.failed)
        self._bar.set_postfix_str(state)

    def close(self) -> None:
        """Erase the line."""
        self._bar.close()
