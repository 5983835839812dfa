"""Profile some steps: a trace per rank for Perfetto, and a summary in the log of rank zero."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from mingpt_ddp import torch_internals
from mingpt_ddp.distributed.runtime import Runtime

log = logging.getLogger(__name__)

Paused: TypeAlias = Callable[[], AbstractContextManager[object]]
STEP = "training step "  # begins the name of the event of a step
TOP = 10  # rows of the summary
LONGEST = 44  # characters of an operator's name
DIRECTORY = "profile"  # in the run directory


class Profiler:
    """Profile the steps of trainer.profile. No number of the run depends on it."""

    def __init__(
        self,
        directory: Path,
        runtime: Runtime,
        profile: tuple[int, int] | None,
        steps: range,
        paused: Paused,
    ) -> None:
        """
        Args:
            directory: of the run.
            profile: the steps of trainer.profile.
            steps: range(steps done so far, steps of the whole run).
            paused: a context for what takes time between steps.
        """
        self.runtime = runtime
        self._paused = paused
        self._directory = directory / DIRECTORY
        self._profile: torch.profiler.profile | None = None  # while profiling
        self._seconds: list[float] = []  # of each profiled step
        first, last = profile or (1, 0)
        self._window = range(max(first, steps.start + 1), min(last, steps.stop) + 1)
        if profile is not None:
            torch_internals.record_gpu_allocations()
        if len(self._window) <= last - first:
            window = self._window
            rest = f"steps {window[0]} to {window[-1]} are" if window else "nothing is"
            log.info(
                "trainer.profile=[%d,%d], but this start trains steps %d to %d: %s profiled",
                first,
                last,
                steps.start + 1,
                steps.stop,
                rest,
            )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile this step if it is one of those; wait for the device at both of its ends."""
        if step not in self._window:
            yield
            return
        if self._profile is None:
            # one cycle; with acc_events torch 2.11 does not warn that others would be lost
            self._profile = torch.profiler.profile(profile_memory=True, acc_events=True)
            with self._paused(), torch_internals.without_profiler_marks():
                self._profile.start()
        begin = self.runtime.now()
        with torch.profiler.record_function(f"{STEP}{step}"):
            yield
            end = self.runtime.now()  # within the event, which holds all kernels of the step
        self._seconds.append(end - begin)
        if step == self._window[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace and log the summary, if steps were profiled since the last call."""
        profile = self._profile
        self._profile = None
        if profile is None:
            return
        with self._paused():
            self._stop(profile)

    def _stop(self, profile: torch.profiler.profile) -> None:
        with torch_internals.without_profiler_marks():
            profile.stop()
        rank = self.runtime.group.rank
        path = self._directory / f"rank{rank}.json.gz"
        partial = self._directory / f"rank{rank}.partial.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            log.warning("cannot write %s, training continues without it: %s", path, error)
        env = self.runtime.group.env
        env.call_on_rank_zero(lambda: log.info("%s", self._summary(profile, str(path))))
        self._seconds.clear()

    def _summary(self, profile: torch.profiler.profile, path: str) -> str:
        """Return which operators or kernels took the time and the memory, on one screen."""
        steps = len(self._seconds)
        milliseconds = 1e3 * sum(self._seconds) / max(steps, 1)
        kind = "device" if self.runtime.device.type == "cuda" else "cpu"
        table = profile.key_averages().table(
            f"self_{kind}_time_total", row_limit=TOP, max_name_column_width=LONGEST
        )
        return (
            f"profile of {steps} steps, {milliseconds:.2f} ms each with the profiler:\n{table}"
            f"the trace is {path}, one per rank; open it in https://ui.perfetto.dev"
        )


@contextmanager
def snapshot_when_out_of_memory(directory: Path, rank: int) -> Iterator[None]:
    """Write which blocks fill the GPU of a rank when an allocation fails in this context.

    Args:
        directory: of the run.
    """
    try:
        yield
    except Exception as error:
        # It passes as it is, or is refused as a ConfigError.
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        path = directory / DIRECTORY / f"rank{rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if torch_internals.dump_gpu_memory(str(path)):
                log.error(
                    "%s shows what fills the GPU: open it in https://pytorch.org/memory_viz", path
                )
        except (OSError, RuntimeError) as failure:
            log.warning("cannot write %s: %s", path, failure)
        raise
