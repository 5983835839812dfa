"""Profile some steps. Each rank writes a trace for Perfetto, and rank zero logs a table."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from mingpt_ddp import torch_internals
from mingpt_ddp.distributed.runtime import Runtime

log = logging.getLogger(__name__)

Paused: TypeAlias = Callable[[], AbstractContextManager[object]]
TABLE_ROWS = 10
NAME_WIDTH = 44  # longest name of an operator in the table, in characters
DIRECTORY = "profile"  # name of the traces' directory, which is in the run directory


class Profiler:
    """Profile the steps that trainer.profile names. The profile does not change any result."""

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
            directory: The run directory.
            profile: First and last step to profile (trainer.profile).
            steps: range(steps done so far, steps of the whole run).
            paused: Opens a context for work that is not part of a step (`Meter.paused`).
        """
        self.runtime = runtime
        self._paused = paused
        self._directory = directory / DIRECTORY
        self._profile: torch.profiler.profile | None = None
        if profile is None:
            return
        torch_internals.record_gpu_allocations()
        first, last = profile
        window = range(max(first, steps.start + 1), min(last, steps.stop) + 1)
        if not window:
            message = "trainer.profile=[%d,%d], but this start trains steps %d to %d: %s"
            log.info(message, first, last, steps.start + 1, steps.stop, "nothing is profiled")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if no step warms the profiler up
            schedule = torch.profiler.schedule(
                wait=window.start, warmup=0, active=len(window), repeat=1
            )
        # Without acc_events, torch 2.11 warns that the events of earlier profiles would be lost.
        # There is only one profile.
        self._profile = torch.profiler.profile(
            schedule=schedule, on_trace_ready=self._write, profile_memory=True, acc_events=True
        )
        self._profile.step_num = steps.start  # the trace then has the step numbers of the run
        self._profile.start()

    def step(self) -> None:
        """Tell the profiler that a step begins, so that it records the steps to profile."""
        if self._profile is not None:
            with torch_internals.without_profiler_noise():
                self._profile.step()

    def close(self) -> None:
        """End the profile if the run ends before the last step to profile."""
        if self._profile is not None:
            with torch_internals.without_profiler_noise():
                self._profile.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace of this rank. Rank zero logs the operators that took most time."""
        self._profile = None
        group = self.runtime.group
        path = self._directory / f"rank{group.rank}.json.gz"
        kind = "device" if self.runtime.device.type == "cuda" else "cpu"
        with self._paused():
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:
                log.warning("cannot write %s, training continues without it: %s", path, error)
            table = profile.key_averages().table(
                f"self_{kind}_time_total", row_limit=TABLE_ROWS, max_name_column_width=NAME_WIDTH
            )
            trace = f"the trace is {path}, one per rank; open it in https://ui.perfetto.dev"
            group.env.call_on_rank_zero(lambda: log.info("profile:\n%s%s", table, trace))


@contextmanager
def snapshot_when_out_of_memory(directory: Path, rank: int) -> Iterator[None]:
    """Write a memory snapshot if the GPU runs out of memory in this context.

    Open the file in https://pytorch.org/memory_viz to see what fills the GPU.

    Args:
        directory: The run directory.
    """
    try:
        yield
    except Exception as error:
        # The error may be the cause of a ConfigError.
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
